"""`python -m verl.trainer.main_ppo` and `verl train`: parse, assemble, run, close."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from verl.config.batch_sizes import derived_sizes, render_sizes
from verl.config.load import load
from verl.config.schema.root import Config
from verl.tracking.console import Console
from verl.trainer.launcher import run, run_all

__all__ = ["main", "train"]


async def train(config: Config, console: Console, reward: Callable[..., Any] | None = None) -> int:
    """One run, from settings to the last step; its exit code.

    `reward` is a function that was given as one, instead of by the path of its file.
    """
    from verl.trainer.build import assemble  # late: settings are checked before Ray is imported

    console.banner(render_sizes(derived_sizes(config)), title="sizes of a step")
    return await run(config, console, lambda config, faults: assemble(config, console, faults=faults, reward=reward))


def main(argv: Sequence[str]) -> int:
    """Run every point of the sweep (one without `-m`), one after another; the exit code."""
    return run_all(load(argv), train)


if __name__ == "__main__":
    from verl.cli import main as command_line

    sys.exit(command_line(["train", *sys.argv[1:]]))
