"""The command `verl`. A subcommand imports what it needs when it is called, so that help and settings come at once."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import verl
from verl.errors import VerlError
from verl.model_merger import HELP as MERGE_HELP
from verl.redaction import redact, remember_arguments

__all__ = ["main"]

FAILED = 1
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


_GENERATE_HELP = """\
usage: verl generate FILE... --output ANSWERS.parquet [settings]

Answer the prompts of files with the rollout engine: actor_rollout_ref.rollout.n answers each, sampled as
actor_rollout_ref.rollout.{temperature,top_p,top_k} say, of at most data.max_response_length tokens. The output has the
rows of the files, with the columns responses, finish_reasons and response_lengths. Given again, it goes on where it was
ended.

options:
  --output FILE           the Parquet file to write (answers.parquet)
  --part N                prompts that are done, or done again, together (256)

example:
  verl generate test.parquet --output answers.parquet model.path=Qwen/Qwen2.5-0.5B-Instruct rollout.n=8
"""

_EVAL_HELP = """\
usage: verl eval ANSWERS... [options] [settings]

Score the answers in files, such as `verl generate` writes, by the reward that the settings name (reward.*), and say for
each data source: mean@n, pass@k (unbiased), maj@n, each with a 95 % interval (bootstrap over prompts).

options:
  --responses COLUMN      the answers: a list of texts, or one text (responses)
  --k K,K                 the k of pass@k (1,2,4,... up to the number of answers)
  --threshold X           the score from which on an answer is right (0.5)
  --draws N               draws of the bootstrap (1000)
  --output FILE           also write the figures as JSON

example:
  verl eval answers.parquet reward.custom_reward_function.path=my_reward.py
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: one line about it, its help, and what it runs."""

    summary: str
    help: str
    run: Callable[[list[str]], int | None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; what a user can mend is said without a traceback, and ends with exit code 2.

    Secrets leave neither in a message nor in a traceback. Trackers that keep `sys.argv` keep it without them.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    remember_arguments(arguments)
    sys.argv[1:] = map(redact, sys.argv[1:])
    try:
        return _dispatch(arguments)
    except VerlError as error:
        sys.stderr.write(redact(f"{error}\n"))
        return USAGE_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # `verl config | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:  # noqa: BLE001 - the edge of the process; Python would print it with its secrets
        sys.stderr.write(redact(traceback.format_exc()))
        return FAILED


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


def _sft(argv: list[str]) -> int:
    from verl.trainer.sft_trainer import main as sft

    return sft(argv)


def _generate(argv: list[str]) -> int:
    from verl.trainer.main_generation import main as generate

    return generate(argv)


def _eval(argv: list[str]) -> int:
    from verl.trainer.main_eval import main as evaluate

    return evaluate(argv)


def _demo(argv: list[str]) -> int | None:
    from verl.demo.main import main as demo

    return demo(argv)


def _merge(argv: list[str]) -> int:
    from verl.model_merger import main as merge

    return merge(argv)


def _config(argv: list[str]) -> int:
    from verl.config.batch_sizes import derived_sizes, render_sizes
    from verl.config.load import load, load_sft, names_and_settings
    from verl.config.render import describe, render
    from verl.config.run_types import SFT, TRAIN
    from verl.config.schema import SftConfig
    from verl.config.sft_checks import sft_sizes

    supervised = "--sft" in argv
    argv = [argument for argument in argv if argument != "--sft"]
    keys, settings = names_and_settings(argv)
    if keys and not settings:
        sys.stdout.write("\n".join(describe(key, SFT if supervised else TRAIN) for key in keys))
        return 0
    runs = load_sft(argv, complete=False) if supervised else load(argv, complete=False)
    for hint in dict.fromkeys(hint for run in runs for hint in run.hints):
        sys.stderr.write(redact(f"hint: {hint}\n"))
    for run in runs:
        if run.sweep:
            sys.stdout.write(f"---\n# {' '.join(run.sweep)}\n")
        config = run.config
        rows = sft_sizes(config) if isinstance(config, SftConfig) else derived_sizes(config)
        sizes = render_sizes(rows).replace("\n", "\n#   ")
        sys.stdout.write(f"{render(config)}\n# What follows from these:\n#   {sizes}\n")
    sys.stdout.flush()
    return 0


def _data(argv: list[str]) -> int:
    from verl.trainer.main_data import main as data

    return data(argv)


COMMANDS: dict[str, Command] = {
    "train": Command(
        "train a model by reinforcement learning",
        f"usage: verl train [settings]\n\nTrain a model by reinforcement learning.\n\n{_GRAMMAR}\n"
        "example:\n  verl train data.train_files=train.parquet actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct "
        "actor_rollout_ref.rollout.n=8\n",
        _train,
    ),
    "sft": Command(
        "train a model on examples: supervised fine-tuning",
        "usage: verl sft [settings]\n\n"
        "Train a model on prompts and answers, or on whole conversations. `verl config --sft` lists the settings.\n\n"
        f"{_GRAMMAR}\n"
        "example:\n  verl sft data.train_files=train.parquet model.path=Qwen/Qwen2.5-0.5B optim.lr=1e-5\n",
        _sft,
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
    "data": Command(
        "show data files as a run will see them: prompts, tokens, lengths, scorers, problems",
        "usage: verl data FILE... [--sft] [--row N] [--head N] [--limit N] [settings]\n\n"
        "Show data files as a run will see them. With actor_rollout_ref.model.path=... prompts go through its chat\n"
        "template and are counted in tokens. Ends with code 1 if something would stop a run or fail its rewards.\n\n"
        "options:\n"
        "  --sft                   examples for `verl sft`, with what is trained of them; needs model.path=...\n"
        "  --row N                 show row N, whole; may be given several times\n"
        "  --head N                show the first N rows (1)\n"
        f"  --limit N               look at the first N rows only\n\n{_GRAMMAR}\n"
        "example:\n  verl data train.parquet actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct "
        "data.max_prompt_length=256\n",
        _data,
    ),
    "generate": Command("answer the prompts of files, into a Parquet file", f"{_GENERATE_HELP}\n{_GRAMMAR}", _generate),
    "eval": Command("score the answers of a file: mean@n, pass@k, maj@n", f"{_EVAL_HELP}\n{_GRAMMAR}", _eval),
    "merge": Command("make a Hugging Face model of a checkpoint, and prove it equal", MERGE_HELP, _merge),
    "config": Command(
        "print the resolved settings with their documentation",
        "usage: verl config [--sft] [settings]\n       verl config [--sft] KEY...\n\n"
        "Print all settings as YAML, with documentation; or explain single ones. With --sft: those of `verl sft`.\n\n"
        f"{_GRAMMAR}",
        _config,
    ),
}
"""Every subcommand by its name, in the order of `verl --help`."""


if __name__ == "__main__":
    sys.exit(main())
