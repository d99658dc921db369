"""`verl demo`: create a tiny model and train it to add, in a few minutes on a laptop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from verl.commands.arguments import SETTINGS_HELP, ArgumentParser
from verl.config.load import LoadedConfig
from verl.demo.run import load_settings, run_demo
from verl.tracking.console import Console

HELP = f"""\
usage: verl demo [--dir DIR] [--steps N] [settings]

Create a tiny model, its tokenizer and addition problems; warm it up, train it and show what it learned.

options:
  --dir DIR               folder for all files (demo)
  --steps N               reinforcement learning steps (40)

{SETTINGS_HELP}"""


def main(argv: Sequence[str]) -> int:
    folder, loaded = read_arguments(argv)
    asyncio.run(run_demo(folder, loaded, Console()))
    return 0


def read_arguments(argv: Sequence[str]) -> tuple[Path, LoadedConfig]:
    """Return the demo's folder and the settings of its run. Other arguments are settings, as in `verl train`."""
    parser = ArgumentParser("verl demo")
    parser.add_argument("--dir", default="demo")
    parser.add_argument("--steps", type=int, default=40)
    options, overrides = parser.parse_known_args(argv)
    folder = Path(options.dir)
    return folder, load_settings(folder, options.steps, overrides)
