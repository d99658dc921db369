"""`verl env`: versions and machine, for bug reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from verl.cluster.environment import collect_report
from verl.commands.arguments import ArgumentParser

HELP = """\
usage: verl env [--json]

Print the versions of verl and its dependencies, the machine, and the environment variables that change how a run
works, for bug reports. Secrets and the path of the home directory are hidden. Nothing is sent anywhere.

options:
  --json                  as one JSON object
"""


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser("verl env")
    parser.add_argument("--json", action="store_true")
    report = collect_report()
    if parser.parse_args(argv).json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return 0
    for title, rows in report.items():
        sys.stdout.write(f"{title}:\n")
        width = max(map(len, rows), default=0)
        sys.stdout.write("".join(f"  {name:<{width}}  {value}\n" for name, value in rows.items()) or "  none\n")
    return 0
