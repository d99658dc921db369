"""`verl watch`: follow a run elsewhere, from the files in its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.commands.arguments import ArgumentParser
from verl.diagnosis.diagnosis import Diagnosis
from verl.diagnosis.rule import Advice
from verl.errors import VerlError
from verl.report.advice import MOST_STEPS, is_recorded
from verl.tracking.console import Console
from verl.tracking.run_folder import RunWarning
from verl.tracking.run_history import KEPT

HELP = """\
usage: verl watch RUN [--once]

Follow a run that goes on elsewhere, from the files in its folder (`metrics.jsonl`, `warnings.jsonl`, `trained.jsonl`,
`starts.jsonl`): the lines of its last steps, then each new one. On a terminal, a panel below them shows recent numbers,
the age of the last step and when the next one is expected; `verl explain` says what the numbers mean. Warnings are
those of the run, and what the same rules find in its metrics if it did not record them. Ctrl-C ends the command, not
the run.

options:
  RUN     folder of the run (trainer.default_local_dir)
  --once  print the last steps and the current numbers, and exit

example:
  verl watch checkpoints/verl/default
"""

_SHOWN = 10  # earlier steps
_POLL_S = 0.5
_PATIENCE_S = 5.0  # a run writes warnings a little later than metrics


def main(argv: Sequence[str]) -> int:
    """Show the run until Ctrl-C, or once; return 0."""
    parser = ArgumentParser("verl watch")
    parser.add_argument("run")
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args(argv)
    folder = Path(options.run)
    if not folder.is_dir():
        raise VerlError(f"verl watch: {folder} is not a folder; give the folder of a run (trainer.default_local_dir)")
    watcher = Watcher(folder, Console())
    try:
        watcher.begin()
        if options.once:
            watcher.console.summary()
            return 0
        with watcher.console.panel():
            while True:
                watcher.poll()
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        return 0


class Watcher:
    """Shows on a console what a run writes to its folder."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.console, self._diagnosis = console, Diagnosis()
        self._recorded: list[RunWarning] = []  # warnings of rules
        self._found: list[tuple[float, int, Advice]] = []  # when, and the step
        self._metrics, self._trained = (_JsonLines(folder / f"{name}.jsonl") for name in ("metrics", "trained"))
        self._warnings, self._starts = (_JsonLines(folder / f"{name}.jsonl") for name in ("warnings", "starts"))

    def begin(self) -> None:
        """Print the last steps; steps before them and earlier warnings are only remembered."""
        history, records = self.console.history, [*self._metrics.read()]
        if records:
            history.start = records[0]["time"]
        for start in self._starts.read():
            self._record_start(start)
        steps = [record["step"] for record in records if _is_step(record)][-KEPT:]
        for warning in self._warnings.read():
            self._remember(warning)
            history.record_warning(str(warning.get("text")))
        for record in records[-MOST_STEPS:]:
            self._diagnose(record)
        for record in records:
            if steps and record["step"] >= steps[-_SHOWN:][0]:
                self._show(record)
                continue
            if _is_step(record):
                history.record_step(_read_numbers(record), record["step"], record["time"])
            if _is_validation(record):
                history.record_validation(_read_numbers(record), record["step"], record["time"])
        for advice in self._take_unrecorded(0.0):
            history.record_warning(advice.text)
        for _ in self._trained.read():
            pass  # resumes before now are not news

    def poll(self) -> None:
        """Print what is new."""
        for start in self._starts.read():
            self._record_start(start)
            self._diagnosis = Diagnosis()  # as in the run itself
        for record in self._trained.read():
            if "resumed" in record:
                self.console.note(f"the run resumed after step {record['step']}")
        for record in self._metrics.read():
            self._show(record)
            self._diagnose(record)
        for warning in self._warnings.read():
            self._remember(warning)
            self.console.advice(str(warning.get("text")), str(warning.get("rule", "")))
        for advice in self._take_unrecorded(_PATIENCE_S):
            self.console.advice(advice.text, advice.rule)

    def _remember(self, warning: Mapping[str, Any]) -> None:
        if rule := str(warning.get("rule", "")):
            self._recorded.append(RunWarning(warning["step"], 0.0, "", rule))

    def _diagnose(self, record: Mapping[str, Any]) -> None:
        step, now = record["step"], time.monotonic()
        self._found += [(now, step, advice) for advice in self._diagnosis.advise(_read_numbers(record), step)]

    def _take_unrecorded(self, patience_s: float) -> Iterator[Advice]:
        """Yield what the rules have found and the run has not recorded within `patience_s`, as runs usually do."""
        due = [each for each in self._found if time.monotonic() - each[0] >= patience_s]
        self._found = [each for each in self._found if each not in due]
        for _, step, advice in due:
            if not is_recorded(step, advice.rule, self._recorded):
                self._recorded.append(RunWarning(step, 0.0, "", advice.rule))
                yield advice

    def _record_start(self, start: Mapping[str, Any]) -> None:
        history = self.console.history
        history.start = start["time"]
        steps = start.get("total_steps")
        history.total_steps = steps if isinstance(steps, int) else None

    def _show(self, record: Mapping[str, Any]) -> None:
        numbers = _read_numbers(record)
        if _is_step(record):
            self.console.step(numbers, record["step"], record["time"])
        if _is_validation(record):
            self.console.validation(numbers, record["step"], record["time"])


class _JsonLines:
    """Reads the records that are appended to a file of JSON lines; the file may not exist yet.

    A resumed run replaces the file: records of its new version that are not newer than those read before are skipped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity, self._offset = 0, 0
        self._newest, self._skipped_until = 0.0, 0.0  # times

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the new records; lines that are not complete records are skipped."""
        for line in self._read_lines():
            try:
                record = json.loads(line)
                at, _ = float(record["time"]), int(record["step"])
            except (ValueError, TypeError, KeyError):
                continue
            if at > self._skipped_until:
                self._newest = max(self._newest, at)
                yield record

    def _read_lines(self) -> list[bytes]:
        """Return the complete lines that were not read yet."""
        try:
            with self._path.open("rb") as file:
                identity = self._path.stat().st_ino
                if identity != self._identity or self._path.stat().st_size < self._offset:
                    self._identity, self._offset, self._skipped_until = identity, 0, self._newest
                file.seek(self._offset)
                data = file.read()
        except OSError:  # not there yet, or just being replaced
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()


def _is_step(record: Mapping[str, Any]) -> bool:
    return "reward/mean" in record or "train/loss" in record


def _is_validation(record: Mapping[str, Any]) -> bool:
    return any(name.startswith("val/") for name in record)


def _read_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a record; NaN and infinities are strings in JSON."""
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity")
    }
