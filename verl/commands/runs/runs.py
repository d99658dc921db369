"""`verl runs`: list the runs below a folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import rich.console
from rich.table import Table
from rich.text import Text

from verl.commands.arguments import ArgumentParser
from verl.errors import VerlError
from verl.redaction import show_controls
from verl.tracking.console import duration
from verl.tracking.run_folder import RunFolder, StepMetrics, is_run_folder

HELP = """\
usage: verl runs [FOLDER]

List the runs below a folder, the latest one first: state, steps, the last reward and validation, and the time since the
last record.

options:
  FOLDER  a folder with runs in it, at most 4 levels deep; by default checkpoints

example:
  verl runs checkpoints/verl
"""

_DEPTH = 4
_STYLES = {"running": "green", "finished": "cyan", "stopped": "yellow"}


def main(argv: Sequence[str]) -> int:
    """Print a table; return 1 if there are no runs."""
    parser = ArgumentParser("verl runs")
    parser.add_argument("folder", nargs="?", default="checkpoints")
    root = Path(parser.parse_args(argv).folder)
    if not root.is_dir():
        raise VerlError(f"verl runs: {root}: no such folder. Give a folder that contains runs")
    folders = [RunFolder(path) for path in find_runs(root)]
    if not folders:
        sys.stdout.write(f"no runs in {root}\n")
        return 1
    console = rich.console.Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(make_table(folders, root, time.time()))
    return 0


def find_runs(root: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Yield the folders of runs; hidden folders, links and the folders inside of runs are not searched."""
    if is_run_folder(root):
        yield root
        return
    try:
        children = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:  # not readable for this user
        return
    for child in children:
        if depth and not child.name.startswith("."):
            yield from find_runs(child, depth - 1)


def make_table(folders: Sequence[RunFolder], root: Path, now: float) -> Table:
    """Return a row for each run, the latest first."""
    rows: list[tuple[float, list[Text]]] = []
    for folder in folders:
        metrics = folder.read_metrics()
        state = folder.read_state(now, metrics)
        steps = f"{state.step:,}" + (f" of {state.total_steps:,}" if state.total_steps else "")
        age = "-" if state.time is None else f"{duration(max(0.0, now - state.time))} ago"
        name = folder.path.name if folder.path == root else str(folder.path.relative_to(root))
        numbers = (steps, _last_reward(metrics), _last_validation(metrics), age)
        cells = [Text(show_controls(name)), Text(state.name, _STYLES[state.name]), *map(Text, numbers)]
        rows.append((state.time or 0.0, cells))
    table = Table("run", "state", box=None, pad_edge=False)
    for title in ("steps", "reward", "validation", "last record"):
        table.add_column(title, justify="right", no_wrap=True)
    for _, cells in sorted(rows, key=lambda row: -row[0]):
        table.add_row(*cells)
    return table


def _last_reward(metrics: Sequence[StepMetrics]) -> str:
    """Return the last mean reward; of supervised training the loss."""
    for values in _newest_first(metrics):
        for name, label in (("reward/mean", ""), ("train/loss", "loss ")):
            if name in values:
                return f"{label}{values[name]:.3f}"
    return "-"


def _last_validation(metrics: Sequence[StepMetrics]) -> str:
    """Return the mean over data sources in the last validation; of supervised training the loss."""
    for values in _newest_first(metrics):
        means = [value for name, value in values.items() if name.startswith("val/") and "/mean@" in name]
        if means:
            return f"{sum(means) / len(means):.3f}"
        if "val/loss" in values:
            return f"loss {values['val/loss']:.3f}"
    return "-"


def _newest_first(metrics: Sequence[StepMetrics]) -> Iterator[Mapping[str, float]]:
    return (each.values for each in reversed(metrics))
