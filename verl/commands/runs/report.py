"""`verl report`: write a run's curves, timeline, samples and settings into one HTML file."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from verl.commands.arguments import ArgumentParser
from verl.errors import VerlError
from verl.report.advice import list_latest, read_advice
from verl.report.html import build_page, write_page
from verl.report.server import ReportServer
from verl.tracking.console import Console
from verl.tracking.run_folder import RunFolder

HELP = """\
usage: verl report RUN [--output FILE]
       verl report RUN --serve [--port PORT]

Write what is known about a run into one HTML file: curves, warnings, the time of each phase, samples with their tokens,
and settings. The file needs no network and no server, and can be sent to others. The run may still be going on, or have
been killed. The warnings are printed as well: those of the run, and what the rules of `verl explain` find in its
metrics. See docs/reports.md.

options:
  RUN             folder of the run (trainer.default_local_dir)
  --output FILE   where to write; by default report.html in the folder of the run
  --serve         serve the page on this machine instead, built again whenever it is loaded; Ctrl-C ends it
  --port PORT     port of 127.0.0.1 for --serve; by default a free one

example:
  verl report checkpoints/verl/default
"""


def main(argv: Sequence[str]) -> int:
    """Write the report, or serve it until the command is interrupted."""
    parser = ArgumentParser("verl report")
    parser.add_argument("run")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--port", type=int)
    options = parser.parse_args(argv)
    if options.serve and options.output is not None:
        parser.error("--output cannot be used with --serve")
    if options.port is not None and not options.serve:
        parser.error("--port needs --serve")
    folder = RunFolder(Path(options.run))
    if options.serve:
        _serve(folder, options.port or 0)
        return 0
    path = options.output or folder.path / "report.html"
    page = build_page(folder, time.time())
    try:
        write_page(page, path)
    except OSError as error:
        raise VerlError(f"verl report: {path}: cannot be written: {error.strerror}. Choose another --output") from error
    sys.stdout.write(f"{path}  ({len(page) / 1e6:.1f} MB)\n")
    console = Console()
    for warning, count in list_latest(read_advice(folder, folder.read_metrics())):
        times = f", {count} times" if count > 1 else ""
        console.advice(f"step {warning.step}{times}: {warning.text}", warning.rule)
    return 0


def _serve(folder: RunFolder, port: int) -> None:
    try:
        server = ReportServer(lambda: build_page(folder, time.time()), port)
    except (OSError, OverflowError) as error:
        raise VerlError(f"verl report: port {port}: {error}. Choose another --port") from error
    with server:
        sys.stdout.write(f"{server.url}\nOnly this address works, and only on this machine. Ctrl-C ends the server.\n")
        sys.stdout.flush()
        server.serve_forever()
