"""Sinks: what reaches the file, what a resumed run keeps, and how a missing one is refused."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console

from verl.tracking.console import Console
from verl.tracking.sink import RunInfo
from verl.tracking.sinks import ConsoleSink, JsonlSink, Sinks, open_sinks

pytestmark = pytest.mark.unit


def read(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def write(folder: Path, steps: list[int], resumed_step: int | None = None) -> None:
    sink = JsonlSink(folder, resumed_step)
    for step in steps:
        sink.log({"reward/mean": step / 10}, step)
    sink.close()


def test_every_step_is_a_line_that_is_written_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "run")
    sink.log({"reward/mean": 0.5, "actor/grad_norm": math.inf, "x": math.nan}, 1)
    (record,) = read(tmp_path / "run")
    assert record.pop("time") > 1e9
    assert record == {"step": 1, "reward/mean": 0.5, "actor/grad_norm": "Infinity", "x": "NaN"}
    sink.close()


def test_a_resumed_run_drops_steps_it_will_repeat_and_a_truncated_line(tmp_path: Path) -> None:
    write(tmp_path, [1, 2, 3, 4])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    write(tmp_path, [3, 4, 5], resumed_step=2)
    assert [record["step"] for record in read(tmp_path)] == [1, 2, 3, 4, 5]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_renames_the_old_file(tmp_path: Path) -> None:
    for last in (1, 2, 3):
        write(tmp_path, list(range(1, last + 1)))
    assert [len(read(tmp_path, name)) for name in ("metrics-1.jsonl", "metrics-2.jsonl", "metrics.jsonl")] == [1, 2, 3]


def test_the_console_sink_writes_a_line_for_the_step_and_one_for_its_validation() -> None:
    out = io.StringIO()
    sink = ConsoleSink(Console(10, rich.console.Console(file=out)))
    sink.log({"reward/mean": 0.5, "val/addition/mean@1": 0.7}, 1)
    sink.log({"val/addition/mean@1": 0.8, "timing_s/validation": 1.0}, 2)
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["step", "validation", "validation"]


def test_wandb_gets_the_run_and_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(log=lambda metrics, step: calls.append((metrics, step)), finish=lambda: calls.append("end"))
    wandb = SimpleNamespace(init=lambda **given: calls.append(given) or run, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    about = {"project": "p", "name": "n", "settings": {"lr": 1, "api_key": "plain-old-words"}, "resumed_step": 3}
    sinks = open_sinks(["wandb"], RunInfo(tmp_path, **about, wandb_proxy="http://proxy:80"))
    sinks.log({"x": 1.0}, 4)
    sinks.close()
    assert calls == [
        {"project": "p", "name": "n", "dir": tmp_path, "config": {"lr": 1, "api_key": "***"}, "resume": "auto"}
        | {"settings": {"https_proxy": "http://proxy:80"}},
        ({"x": 1.0}, 4),
        "end",
    ]


def test_none_logs_nothing_and_several_sinks_are_one(tmp_path: Path) -> None:
    open_sinks(["none"], RunInfo(tmp_path)).log({"x": 1.0}, 1)
    assert not list(tmp_path.iterdir())
    jsonl = JsonlSink(tmp_path)
    sinks = Sinks([jsonl])
    sinks.log({"x": 1.0}, 1)
    sinks.close()
    assert len(read(tmp_path)) == 1
    with pytest.raises(ValueError, match="closed file"):
        jsonl.log({}, 2)
