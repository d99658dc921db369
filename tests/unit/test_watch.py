"""`verl watch` follows the files of a run: appended and truncated lines, resumes, and runs that have just started."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import rich.console

from verl.cli import main
from verl.commands.runs.watch import Watcher
from verl.tracking.console import Console

pytestmark = pytest.mark.unit


def append(folder: Path, name: str, *records: dict[str, Any]) -> None:
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def step(number: int, at: float, **more: Any) -> dict[str, Any]:
    return {"step": number, "time": at, "reward/mean": number / 100, "timing_s/step": 10.0, **more}


class SimulatedTime:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Lines(Console):
    """A console that keeps its lines."""

    def __init__(self) -> None:
        super().__init__(out=rich.console.Console(file=io.StringIO()))
        self.lines: list[str] = []

    def _write(self, line: Any) -> None:
        self.lines.append(" ".join(line.plain.split()))

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


def test_the_last_steps_come_first_and_new_ones_as_they_appear(tmp_path: Path) -> None:
    append(tmp_path, "metrics", {"step": 0, "time": 90.0, "timing_s/start": 5.0})
    append(tmp_path, "metrics", *(step(number, 100.0 + number) for number in range(1, 21)))
    append(tmp_path, "metrics", {"step": 5, "time": 105.5, "val/a/mean@1": 0.5})
    append(tmp_path, "warnings", {"step": 3, "time": 103.0, "text": "too fast"})
    watcher = Watcher(tmp_path, console := Lines())
    watcher.begin()
    assert [line.split()[1] for line in console.take()] == [str(number) for number in range(11, 21)]
    assert (len(console.history.steps), len(console.history.validations)) == (20, 1)
    assert (console.history.warning_count, console.history.start) == (1, 90.0)
    watcher.poll()
    assert console.take() == []
    append(tmp_path, "metrics", step(21, 121.0), {"step": 21, "time": 121.0, "val/a/mean@1": "NaN"})
    append(tmp_path, "warnings", {"step": 21, "time": 121.0, "text": "too slow"})
    watcher.poll()
    assert console.take() == ["step 21 reward 0.210 | total 10.0s", "validation 21 a/mean@1 nan", "! too slow"]


def test_a_line_that_is_being_written_is_read_when_it_is_complete(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path, console := Lines())
    watcher.begin()
    text = json.dumps(step(1, 101.0))
    for part in (text[:20], text[20:]):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(part)
        watcher.poll()
    assert console.take() == []
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": \n[]\n{"step": 2}\n')
    watcher.poll()
    assert [line.split()[1] for line in console.take()] == ["1"]


def test_a_resumed_run_that_replaces_its_files_is_followed(tmp_path: Path) -> None:
    append(tmp_path, "metrics", *(step(number, 100.0 + number) for number in range(1, 6)))
    append(tmp_path, "trained", {"step": 5, "time": 105.0})
    watcher = Watcher(tmp_path, console := Lines())
    watcher.begin()
    console.take()
    for name, records in {
        "metrics": [*(step(number, 100.0 + number) for number in range(1, 4)), step(4, 204.0)],
        "trained": [{"step": 3, "time": 200.0, "resumed": True}],
    }.items():
        (tmp_path / f"{name}.jsonl").rename(tmp_path / f"{name}-1.jsonl")
        append(tmp_path, name, *records)
    append(tmp_path, "starts", {"step": 3, "time": 199.0, "total_steps": 50, "command": "verl train"})
    watcher.poll()
    resumed, again = console.take()
    assert resumed == "the run resumed after step 3"
    assert again.startswith("step 4/50 reward 0.040")
    assert [each.step for each in console.history.steps] == [1, 2, 3, 4]
    assert console.history.start == 199.0


def test_once_prints_the_current_state_and_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(tmp_path, "metrics", step(1, time.time() - 4, **{"actor/entropy": 0.5}))
    append(tmp_path, "warnings", {"step": 1, "time": 1.0, "text": "\x1b[2Jhostile"})
    assert main(["watch", str(tmp_path), "--once"]) == 0
    text = capsys.readouterr().out
    assert "last step 4s ago, the next is expected in about 6s" in text
    assert "entropy       0.50" in text
    assert "\x1b" not in text
    assert main(["watch", str(tmp_path / "missing"), "--once"]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_rules_are_applied_to_a_run_that_does_not_record_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimulatedTime()
    monkeypatch.setattr("verl.commands.runs.watch.time", clock)
    append(tmp_path, "metrics", step(1, 101.0, **{"actor/kl_loss": 9.0}))
    watcher = Watcher(tmp_path, console := Lines())
    watcher.begin()
    assert console.history.warning_count == 1
    assert "actor/kl_loss is 9" in console.history.last_warning
    console.take()
    append(tmp_path, "metrics", step(2, 102.0, **{"actor/kl_loss": 9.0, "response_length/clip_ratio": 0.9}))
    watcher.poll()
    assert len(console.take()) == 1, "the run may write its warning a moment later"
    clock.now += 10.0
    watcher.poll()
    [line] = console.take()
    assert line.startswith("! 90% of the responses were truncated")
    assert line.endswith("(verl explain truncated-responses)")


def test_a_warning_that_the_run_records_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimulatedTime()
    monkeypatch.setattr("verl.commands.runs.watch.time", clock)
    watcher = Watcher(tmp_path, console := Lines())
    watcher.begin()
    append(tmp_path, "metrics", step(1, 101.0, **{"actor/kl_loss": 9.0}))
    watcher.poll()
    append(tmp_path, "warnings", {"step": 1, "time": 101.0, "text": "too fast", "rule": "kl-explosion"})
    watcher.poll()
    clock.now += 10.0
    watcher.poll()
    assert [line for line in console.take() if line.startswith("!")] == ["! too fast (verl explain kl-explosion)"]


def test_ctrl_c_ends_the_command_with_code_0(tmp_path: Path) -> None:
    listen = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # programs in the background ignore it
    code = f"import signal, sys; {listen}; from verl.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code]
    append(tmp_path, "metrics", step(1, 101.0))
    process = subprocess.Popen([*command, "watch", str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step      1  reward  0.010")
    append(tmp_path, "metrics", step(2, 102.0))
    assert process.stdout.readline().startswith("step      2  reward  0.020")
    process.send_signal(2)
    rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "")
