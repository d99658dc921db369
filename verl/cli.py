"""The command `verl`. A subcommand imports what it needs when it is called, so that help and settings come at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import verl
from verl.errors import VerlError

__all__ = ["main"]

USAGE_ERROR = 2
INTERRUPTED = 130

_GRAMMAR = """\
settings:
  key=value               set a setting; `verl config` lists them all, `verl config KEY` explains one
  +key=value              add an entry to an open dictionary (engine_kwargs, ray_init, ...)
  ~key                    back to the default
  --config-path DIR       directory of your YAML files
  --config-name NAME      one of them; its `defaults:` list and ${...} work as in Hydra
  -m, --multirun          key=a,b runs once for each value
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: one line about it, its help, and what it runs."""

    summary: str
    help: str
    run: Callable[[list[str]], int | None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; what a user can mend is said without a traceback, and ends with exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except VerlError as error:
        sys.stderr.write(f"{error}\n")
        return USAGE_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # `verl config | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(arguments: list[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        return 0
    if name in ("-V", "--version", "version"):
        sys.stdout.write(f"verl {verl.__version__}\n")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        raise VerlError(f"verl: {name!r} is not a command; there are {', '.join(COMMANDS)} (see `verl --help`)")
    if any(argument in ("-h", "--help") for argument in rest):
        sys.stdout.write(command.help)
        return 0
    return command.run(rest) or 0


def _overview() -> str:
    rows = "\n".join(f"  {name:<10}{command.summary}" for name, command in COMMANDS.items())
    return (
        f"usage: verl COMMAND [settings]\n\n{verl.__doc__}\n\ncommands:\n{rows}\n\n`verl COMMAND --help` says more.\n"
    )


def _train(argv: list[str]) -> int | None:
    from verl.trainer.main_ppo import main as train

    return train(argv)


def _demo(argv: list[str]) -> int | None:
    from verl.demo.main import main as demo

    return demo(argv)


def _config(argv: list[str]) -> int:
    from verl.config.load import load
    from verl.config.show import describe, render
    from verl.config.sizes import derived_sizes, render_sizes

    keys = [argument for argument in argv if _is_key(argument)]
    if keys and len(keys) == len(argv):
        sys.stdout.write("\n".join(describe(key) for key in keys))
        return 0
    runs = load(argv, complete=False)
    for hint in dict.fromkeys(hint for run in runs for hint in run.hints):
        sys.stderr.write(f"hint: {hint}\n")
    for run in runs:
        if run.sweep:
            sys.stdout.write(f"---\n# {' '.join(run.sweep)}\n")
        sizes = render_sizes(derived_sizes(run.config)).replace("\n", "\n#   ")
        sys.stdout.write(f"{render(run.config)}\n# What follows from these:\n#   {sizes}\n")
    sys.stdout.flush()
    return 0


def _is_key(argument: str) -> bool:
    return not argument.startswith(("-", "~", "+")) and "=" not in argument


COMMANDS: dict[str, Command] = {
    "train": Command(
        "train a model by reinforcement learning",
        f"usage: verl train [settings]\n\nTrain a model by reinforcement learning.\n\n{_GRAMMAR}\n"
        "example:\n  verl train data.train_files=train.parquet actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct "
        "actor_rollout_ref.rollout.n=8\n",
        _train,
    ),
    "demo": Command(
        "make a tiny model and watch it learn, without a download",
        "usage: verl demo [--dir DIR] [--steps N] [settings]\n\n"
        "Make a tiny model, its tokenizer and arithmetic problems; warm it up, train it and show what it learned.\n\n"
        "options:\n"
        "  --dir DIR               folder for all that is made (demo)\n"
        f"  --steps N               reinforcement-learning steps (40)\n\n{_GRAMMAR}",
        _demo,
    ),
    "config": Command(
        "print the resolved settings with their documentation",
        "usage: verl config [settings]\n       verl config KEY...\n\nPrint all settings as YAML, with documentation; "
        f"or explain single ones.\n\n{_GRAMMAR}",
        _config,
    ),
}
"""Every subcommand by its name, in the order of `verl --help`."""


if __name__ == "__main__":
    sys.exit(main())
