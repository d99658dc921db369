"""`verl doctor` and `verl train --dry-run`: all that is wrong with a run, without starting it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from verl.commands.arguments import SETTINGS_HELP, ArgumentParser
from verl.memory_plan.accelerators import DEVICES, Device
from verl.preflight.finding import Finding, Report, Severity
from verl.redaction import redact, show_controls

HELP = f"""\
usage: verl doctor [--device NAME] [--memory GIB] [--seconds N] [--json] [settings]

Check this machine and, with settings, everything about a run that can be known before it starts: settings, model,
data files, every prompt, the reward on real rows, tools, agents, the folder of the run, devices, ports, memory. All
findings are printed at once, the most serious first. `verl train --dry-run` does the same. No engine is started.
Exits with code 1 if a run would not start.

options:
  --device NAME           {", ".join(DEVICES)}: estimate memory and time there; default: the GPUs of this machine
  --memory GIB            memory of that device
  --seconds N             time for reading prompts (2); how many were read is printed
  --json                  as one JSON object

{SETTINGS_HELP}
example:
  verl doctor data.train_files=train.parquet actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct
"""

_MARKS = {
    Severity.ERROR: ("✗", "bold red", "error"),
    Severity.WARNING: ("!", "bold yellow", "warning"),
    Severity.NOTE: ("·", "cyan", "note"),
}


def main(argv: Sequence[str]) -> int:
    """Print what is wrong with this machine, or with a run; return 1 if a run would not start."""
    options, settings = read_arguments(argv)
    from verl.preflight.run_checks import Limits, check_machine, check_run

    report = check_run(settings, _get_device(options), Limits(options.seconds)) if settings else check_machine()
    if options.json:
        sys.stdout.write(json.dumps(describe_report(report)) + "\n")
    else:
        print_report(report, Console(highlight=False, markup=False, emoji=False))
    return int(report.count(Severity.ERROR) > 0)


def read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the settings of the run."""
    parser = ArgumentParser("verl doctor")
    parser.add_argument("--device", choices=DEVICES)
    parser.add_argument("--memory", type=float)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", action="store_true")
    options, settings = parser.parse_known_args(list(argv))
    if options.memory is not None and options.device is None:
        parser.error("--memory needs --device")
    return options, settings


def _get_device(options: argparse.Namespace) -> Device | None:
    device = None if options.device is None else DEVICES[options.device]
    return device if device is None or options.memory is None else replace(device, memory_gib=options.memory)


def describe_report(report: Report) -> dict[str, object]:
    """Return the report as JSON."""
    return {
        "findings": [
            {
                "severity": finding.severity.name.lower(),
                "place": redact(finding.place),
                "problem": redact(finding.problem),
                "fix": redact(finding.fix),
            }
            for finding in report.sorted_findings
        ],
        "checked": report.checked,
        "skipped": report.skipped,
    }


def print_report(report: Report, out: Console, goal: str = "a run would not start") -> None:
    """Print the findings, what was checked and what was not, within the width of the terminal.

    `goal` says what errors prevent.
    """
    for finding in report.sorted_findings:
        _print_finding(finding, out)
    for title, topics in (("checked", report.checked), ("not checked", report.skipped)):
        if topics:
            out.print(Text(title, style="bold"))
            for topic, text in topics.items():
                _print_indented(Text.assemble((f"{topic}: ", "dim"), _clean(text)), out)
    out.print(_summarize(report, goal))


def _print_finding(finding: Finding, out: Console) -> None:
    mark, style, _ = _MARKS[finding.severity]
    out.print(Text.assemble((f"{mark} ", style), (_clean(finding.place), "bold")))
    _print_indented(Text(_clean(finding.problem)), out)
    if finding.fix:
        _print_indented(Text.assemble(("→ ", style), _clean(finding.fix[0].upper() + finding.fix[1:])), out)
    out.print()


def _print_indented(text: Text, out: Console) -> None:
    for line in text.split("\n", allow_blank=True):
        for piece in line.wrap(out, max(20, out.width - 2)):
            piece.rstrip()
            out.print(Text.assemble("  ", piece), soft_wrap=True)


def _clean(text: str) -> str:
    return show_controls(redact(text))


def _summarize(report: Report, goal: str) -> Text:
    counts = [
        f"{count} {name}{'s' * (count > 1)}"
        for severity, (_, _, name) in _MARKS.items()
        if (count := report.count(severity))
    ]
    if report.count(Severity.ERROR):
        return Text(f"{', '.join(counts)}: {goal}", style="bold red")
    return Text(", ".join(counts) + ": no errors" if counts else "nothing is wrong", style="bold green")
