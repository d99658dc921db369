"""A metric logger that fails does not end a run, and loses nothing that fits its buffer."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from recording_console import RecordingConsole

from verl.tracking import buffered_sink
from verl.tracking.buffered_sink import BufferedSink
from verl.tracking.sink import RunInfo, Sink
from verl.tracking.sinks import JsonlSink, open_sinks

pytestmark = pytest.mark.unit


class Tracker:
    """Raises `error` while it has one."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.steps: list[int] = []
        self.calls = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        self.steps.append(step)

    def close(self) -> None:
        if self.error is not None:
            raise self.error


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(tracker: Tracker, console: RecordingConsole) -> tuple[BufferedSink, Clock]:
    clock = Clock()
    return BufferedSink(lambda: tracker, "tracker", "Check the network.", console, clock=clock), clock


def test_records_of_an_outage_are_written_later_and_in_order() -> None:
    tracker, console = Tracker(), RecordingConsole()
    sink, clock = make(tracker, console)
    sink.log({"x": 1.0}, 1)
    tracker.error = ConnectionError("refused")
    for step in (2, 3, 4):
        clock.now += 0.4
        sink.log({"x": 1.0}, step)
    assert tracker.calls == 2, "not asked again before the pause is over"
    tracker.error = None
    clock.now += 1
    sink.log({"x": 1.0}, 5)
    sink.close()
    assert tracker.steps == [1, 2, 3, 4, 5]
    (outage, end) = console.messages
    assert "tracker: cannot be written: refused" in outage
    assert "Check the network." in outage
    assert "works again" in end


def test_an_outage_is_reported_once_and_what_is_lost_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffered_sink, "MAX_RECORDS", 3)
    tracker, console = Tracker(), RecordingConsole()
    sink, clock = make(tracker, console)
    tracker.error = ConnectionError("refused")
    for step in range(5):
        clock.now += 1000
        sink.log({}, step)
    sink.close()
    assert [message.partition(":")[2][:24] for message in console.messages] == [
        " cannot be written: refu",
        " 5 records were lost, be",
        " was not closed properly",
    ]


def test_a_logger_that_cannot_be_opened_is_opened_later() -> None:
    tracker, console, attempts = Tracker(), RecordingConsole(), []

    def open_tracker() -> Sink:
        attempts.append(1)
        if len(attempts) == 1:
            raise ConnectionError("no route")
        return tracker

    clock = Clock()
    sink = BufferedSink(open_tracker, "tracker", "", console, clock=clock)
    sink.log({}, 1)
    clock.now += 10
    sink.log({}, 2)
    assert tracker.steps == [1, 2]


def test_other_errors_of_opening_are_configuration_errors() -> None:
    def open_tracker() -> Sink:
        raise ModuleNotFoundError("No module named 'wandb'")

    with pytest.raises(ModuleNotFoundError):
        BufferedSink(open_tracker, "wandb", "", RecordingConsole())


def test_a_line_that_does_not_fit_the_disk_leaves_no_part_of_it(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.log({"x": 1.0}, 1)
    real = sink._file

    class Full:
        def write(self, data: memoryview) -> int:
            if len(data) > 10:
                return real.write(data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    sink._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"):
        sink.log({"x": 2.0}, 2)
    sink._file = real
    sink.log({"x": 3.0}, 3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3]


def test_a_file_that_cannot_be_made_is_named_with_what_to_free(tmp_path: Path) -> None:
    folder, console = tmp_path / "run", RecordingConsole()
    folder.write_text("a file in its place")
    sinks = open_sinks(["jsonl"], RunInfo(folder), console)
    sinks.log({"x": 1.0}, 1)
    assert f"{folder}/metrics.jsonl: cannot be written" in console.messages[0]
    assert f"df -h {folder}" in console.messages[0]
