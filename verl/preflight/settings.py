"""The settings: all that is wrong with them, and the settings with which the other checks can go on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from verl.config.load import TRAIN, LoadedConfig, inspect_run
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.preflight.finding import Finding, Report, Severity

TOPIC = "settings"
_HINT = re.compile(r"(\S+?):? ((?:is an alias of|has no effect|.* is a declared setting).*)", re.DOTALL)


def check_settings(argv: Sequence[str], report: Report) -> list[LoadedConfig[Config]]:
    """Add what is wrong with the settings; return those of every run of a sweep, with defaults for wrong ones."""
    try:
        runs, problems = inspect_run(TRAIN, argv)
    except ConfigError as error:  # the command line cannot be read at all
        runs, problems = [], error.problems
    report.add(TOPIC, (Finding.from_message(problem) for problem in problems))
    wrong = {finding.place for finding in report.findings}
    for run in runs:
        report.add(TOPIC, (hint for hint in map(_read_hint, run.hints) if hint.place not in wrong))
    given = len({key for run in runs for key in run.origins})
    report.checked[TOPIC] = f"{given} given" + (f", {len(runs)} runs of a sweep" if len(runs) > 1 else "")
    return runs


def _read_hint(hint: str) -> Finding:
    """Return a hint as a finding; another spelling of a setting is not a mistake."""
    match = _HINT.match(hint)
    if match is None:
        return Finding.from_message(hint, Severity.WARNING)
    place, text = match.groups()
    if not text.startswith("has no effect"):
        return Finding(Severity.NOTE, place, text)
    finding = Finding.from_message(text, Severity.WARNING, place)
    return replace(finding, fix="remove it" + f", or {finding.fix}" * bool(finding.fix))
