"""`python -m verl.trainer.sft_trainer` and `verl sft`: parse, assemble, run, close."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.config.batch_sizes import render_sizes
from verl.config.load import load_sft
from verl.config.schema import SftConfig
from verl.config.sft_checks import sft_sizes
from verl.tracking.console import Console
from verl.trainer.launcher import run, run_all

__all__ = ["main", "train"]


async def train(config: SftConfig, console: Console) -> int:
    """One run, from settings to the last step; its exit code."""
    from verl.trainer.sft_build import assemble_sft  # late: settings are checked before Ray is imported

    console.banner(render_sizes(sft_sizes(config)), title="sizes of a step")
    return await run(config, console, lambda config, faults: assemble_sft(config, console, faults=faults))


def main(argv: Sequence[str]) -> int:
    """Run every point of the sweep (one without `-m`), one after another; the exit code."""
    return run_all(load_sft(argv), train)


if __name__ == "__main__":
    from verl.cli import main as command_line

    sys.exit(command_line(["sft", *sys.argv[1:]]))
