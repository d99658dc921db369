"""`verl compare`: the settings and metrics of two runs side by side."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import rich.console
from rich.table import Table
from rich.text import Text

from verl.commands.arguments import ArgumentParser
from verl.redaction import redact, show_controls
from verl.tracking.run_folder import RunFolder, Setting, StepMetrics, merge_names

HELP = """\
usage: verl compare A B [--metrics PATTERNS]

Print the settings in which two runs differ, and the last and best values of their metrics side by side. The best value
is the highest one of rewards, validations and throughput, and the lowest one of losses, errors and times.

options:
  A, B                folders of runs (trainer.default_local_dir)
  --metrics PATTERNS  names of metrics, separated by commas; * is any text. By default rewards, validations, lengths,
                      entropy, KL divergence, gradient norm, time and throughput

example:
  verl compare checkpoints/verl/first checkpoints/verl/second
"""

METRICS = (
    *("reward/mean", "val/*mean@*", "val/loss", "train/loss", "response_length/mean", "actor/entropy", "actor/kl*"),
    *("actor/grad_norm", "timing_s/step", "perf/throughput"),
)
_LOW_IS_BETTER = ("val/loss", "train/loss", "timing_s/*", "*error_rate", "*timeout_rate")
_HIGH_IS_BETTER = ("reward/mean", "critic/score/mean", "val/*", "perf/throughput*", "perf/tokens_per_s/*", "perf/mfu/*")
_MISSING = "-"


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser("verl compare")
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--metrics", default=",".join(METRICS))
    options = parser.parse_args(argv)
    runs = [RunFolder(Path(path)) for path in (options.first, options.second)]
    console = rich.console.Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for title, table in (
        ("settings that differ", make_settings_table(runs)),
        ("metrics", make_metrics_table(runs, options.metrics.split(","))),
    ):
        console.print(Text(title, "bold"))
        console.print(table if table.row_count else Text("  none"))
        console.print()
    return 0


def make_settings_table(runs: Sequence[RunFolder]) -> Table:
    """Return a row for each setting whose value differs, or that only one of the runs has."""
    settings = [{each.key: each.value for each in _list_settings(run)} for run in runs]
    table = Table("setting", *_name_runs(runs), box=None, pad_edge=False)
    for key in dict.fromkeys(key for each in settings for key in each):
        values = [each.get(key, _MISSING) for each in settings]
        if len(set(values)) > 1:
            table.add_row(*(Text(redact(text)) for text in (key, *values)))
    return table


def make_metrics_table(runs: Sequence[RunFolder], patterns: Sequence[str]) -> Table:
    """Return a row for each metric: the last and the best value in each run, and the step of the best one."""
    table = Table("metric", box=None, pad_edge=False)
    for name in _name_runs(runs):
        table.add_column(f"{name}: last", justify="right")
        table.add_column("best", justify="right")
    metrics = [run.read_metrics() for run in runs]
    names = list(dict.fromkeys(name for each in metrics for name in merge_names(each)))
    for name in dict.fromkeys(name for pattern in patterns for name in names if fnmatchcase(name, pattern.strip())):
        cells = [cell for each in metrics for cell in describe_metric(each, name)]
        table.add_row(Text(show_controls(name)), *(Text(cell) for cell in cells))
    return table


def describe_metric(metrics: Sequence[StepMetrics], name: str) -> tuple[str, str]:
    """Return the last value, and the best one with its step if the metric has one."""
    values = [(each.values[name], each.step) for each in metrics if name in each.values]
    if not values:
        return _MISSING, _MISSING
    last, finite = f"{values[-1][0]:.4g}", [each for each in values if math.isfinite(each[0])]
    is_low, is_high = (
        any(fnmatchcase(name, each) for each in patterns) for patterns in (_LOW_IS_BETTER, _HIGH_IS_BETTER)
    )
    if not finite or not (is_low or is_high):
        return last, _MISSING
    best, step = min(finite) if is_low else max(finite, key=lambda each: each[0])
    return last, f"{best:.4g} at {step}"


def _list_settings(run: RunFolder) -> Sequence[Setting]:
    """Return all settings, or those that were changed in the last start if there is no settings.yaml."""
    if settings := run.read_settings():
        return settings
    starts = run.read_starts()
    return starts[-1].settings if starts else []


def _name_runs(runs: Sequence[RunFolder]) -> list[str]:
    """Return the names of the folders; longer ones if they are equal."""
    names = [run.path.resolve().name for run in runs]
    return [show_controls(name) for name in (names if len(set(names)) > 1 else [run.name for run in runs])]
