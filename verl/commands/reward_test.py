"""`verl reward-test`: a reward function on rows of the data, reference solutions and hostile responses."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from rich.console import Console

from verl.commands.arguments import SETTINGS_HELP, ArgumentParser
from verl.commands.doctor import print_report
from verl.config.command_line import split_arguments
from verl.config.features import data_splits
from verl.config.load import load_for_generation
from verl.config.schema import Config
from verl.errors import ConfigError, DataError
from verl.preflight import reward_trial as trial
from verl.preflight.finding import Report, Severity
from verl.preflight.hostile_responses import list_hostile_responses
from verl.preflight.reward_rows import RewardRow, read_reward_rows
from verl.rewards.reward_function import explain_no_scorer, resolve_scorer
from verl.tracking import console as tracking

HELP = f"""\
usage: verl reward-test FILE... [--rows N] [--repeats N] [--timeout S] [settings]

Try the reward of the settings (reward.*) on rows of the data: on their reference solutions, an empty response, and 35
hostile ones (very long, Unicode, nested brackets, LaTeX, numbers too large, code fences, ...). Prints the scores and
the time of each, and reports exceptions, hangs, constant scores, scores that change, and responses that score as high
as the reference without a solution. The function runs as in training: in processes with limits. Exits with code 1
after an error.

options:
  --rows N                rows to try (4), spread over the files
  --repeats N             calls of each response (2), to find scores that change
  --timeout S             limit of a call in seconds (10); in training it is reward.deadline_s

{SETTINGS_HELP}
example:
  verl reward-test train.parquet reward.custom_reward_function.path=my_reward.py
"""

TOPIC = "reward"
SLOW_S = 1.0


def read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], Config]:
    """Return the options, the files, which may also come from the settings, and the settings."""
    parser = ArgumentParser("verl reward-test")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=10.0)
    options, rest = parser.parse_known_args(list(argv))
    files, settings = split_arguments(rest)
    config = load_for_generation(settings).config
    files = files or data_splits(config).get("train", [])
    if not files:
        parser.error("name a file, such as `verl reward-test train.parquet`")
    if min(options.rows, options.repeats) < 1 or options.timeout <= 0:
        parser.error("--rows and --repeats must be at least 1, and --timeout above 0")
    return options, files, config


def main(argv: Sequence[str]) -> int:
    """Print scores, times and findings; return 1 if the function fails or has no signal."""
    options, files, config = read_arguments(argv)
    if config.reward.reward_model.enable:
        raise ConfigError(["reward.reward_model.enable: verl reward-test tries functions; set it to false"])
    rows = read_reward_rows(files, config.data.prompt_key, options.rows)
    if not rows:
        raise DataError(f"{', '.join(files)}: no row can be read; `verl data {files[0]}` says why")
    for row in rows:
        if resolve_scorer(config, row.data_source) is None:
            raise DataError(f"{row.location}: {explain_no_scorer(row.data_source)}")
    calls = list_calls(rows)
    with tracking.Console().stage(f"scoring {len(calls) * options.repeats:,} responses", is_logged=False):
        outcomes = asyncio.run(trial.try_reward(config, calls, timeout_s=options.timeout, repeats=options.repeats))
    sys.stdout.write(format_table(outcomes))
    report = judge(config, outcomes)
    report.checked[TOPIC] = f"{len(calls):,} responses to {len(rows)} rows, {options.repeats} calls each"
    print_report(
        report, Console(highlight=False, markup=False, emoji=False), goal="a policy could not be trained on it"
    )
    return int(report.count(Severity.ERROR) > 0)


def list_calls(rows: Sequence[RewardRow]) -> list[trial.Call]:
    """Return the references of every row, an empty response, and all hostile ones."""
    calls = []
    for row in rows:
        calls += [trial.Call(row, trial.REFERENCE, text) for text in row.references]
        calls.append(trial.Call(row, trial.EMPTY, ""))
        hostile = list_hostile_responses(row.prompt, row.references[0] if row.references else "")
        calls += [trial.Call(row, name, text) for name, text in hostile.items()]
    return calls


def judge(config: Config, outcomes: Sequence[trial.Outcome]) -> Report:
    """Return everything that is wrong with the function."""
    report = Report()
    report.add(TOPIC, trial.find_failures(outcomes))
    report.add(TOPIC, trial.find_constant(outcomes))
    report.add(TOPIC, trial.find_no_signal(outcomes))
    report.add(TOPIC, trial.find_unstable(outcomes))
    report.add(TOPIC, trial.find_unearned(outcomes))
    report.add(TOPIC, trial.find_slow(config, outcomes, SLOW_S))
    return report


def format_table(outcomes: Sequence[trial.Outcome]) -> str:
    """Return one line per kind of response: its scores over all rows, and the times of a call."""
    by_kind: dict[str, list[trial.Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.call.kind].append(outcome)
    width = max(map(len, by_kind))
    lines = [f"{'response':<{width}}  {'scores':<16}{'median':>9}{'longest':>9}  failed"]
    for kind, each in by_kind.items():
        scores = [score for outcome in each for score in outcome.scores]
        seconds = [second for outcome in each for second in outcome.seconds]
        failed = sum(outcome.failure is not None for outcome in each)
        lines.append(
            f"{kind:<{width}}  {_format_range(scores):<16}{_format_time(median(seconds)):>9}"
            f"{_format_time(max(seconds)):>9}  {failed or ''}".rstrip()
        )
    return "\n".join([*lines, "", ""])


def _format_range(scores: Sequence[float]) -> str:
    if not scores:
        return "none"
    low, high = min(scores), max(scores)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _format_time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
