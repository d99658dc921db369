"""What the commands share: their names, the help about settings, and a parser that reports errors as `VerlError`."""

from __future__ import annotations

import argparse
from typing import NoReturn

from verl.errors import VerlError

COMMANDS = {
    "train": "train a model with reinforcement learning",
    "sft": "train a model on examples (supervised fine-tuning)",
    "demo": "create a tiny model and train it, without downloads",
    "data": "inspect data files as a run will read them: prompts, lengths, scorers, problems",
    "generate": "generate responses to the prompts of data files",
    "eval": "score responses: mean@n, pass@k, maj@n",
    "merge": "convert a checkpoint to a Hugging Face model and verify it",
    "config": "print all settings with their documentation",
    "watch": "follow a run elsewhere, from the files in its folder",
    "show": "read the responses that a run has recorded",
    "report": "write a run's curves, timeline, samples and settings into one HTML file",
    "runs": "list the runs below a folder: state, steps, last reward and validation",
    "compare": "print the settings and metrics of two runs side by side",
    "explain": "say what a number on the terminal or a metric means",
    "audit": "prove from a run's folder that every prompt was trained once, in time",
    "replay": "run a recorded step again in one process: same loss, same gradient norm",
    "scale": "change the number of rollout engines of a run while it goes on",
    "doctor": "check this machine or, with settings, a run before it starts",
    "gpu-check": "check GPUs, drivers and packages by what runs do with them; also on the CPU",
    "reward-test": "try the reward on rows of the data and on hostile responses",
    "plan": "estimate memory and time of a run, and propose settings with which it fits",
    "migrate": "turn a launch script or YAML of another setup into a command of verl",
    "env": "print versions and machine, for bug reports",
    "completion": "print a script that completes commands and settings in a shell",
}
"""Name -> summary of every subcommand, in the order of `verl --help`."""

_RUNS = ("watch", "show", "report", "runs", "compare", "audit", "replay", "scale")
MODULES = {
    "generate": "models.generate",
    "eval": "models.evaluate",
    "merge": "models.merge",
    "reward-test": "reward_test",
    "gpu-check": "gpu_check",
    **{name: f"runs.{name}" for name in _RUNS},
}
"""Modules in `verl.commands` that are not named after their command."""

SETTINGS_HELP = """\
settings:
  key=value               set a setting; `verl config` lists all settings, `verl config KEY` explains one
  +key=value              add an entry to an open dictionary (engine_kwargs, ray_init, ...)
  ~key                    reset a setting to its default
  --config-path DIR       directory of your YAML files
  --config-name NAME      YAML file to load from it; `defaults:` lists and ${...} work as in Hydra
  -m, --multirun          run once per value of key=a,b
"""


class ArgumentParser(argparse.ArgumentParser):
    """A parser for the options of one command; `--help` is handled by `verl.cli`."""

    def __init__(self, prog: str, *, allow_abbrev: bool = False) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=allow_abbrev)

    def error(self, message: str) -> NoReturn:
        raise VerlError(f"{self.prog}: {message} (see `{self.prog} --help`)")
