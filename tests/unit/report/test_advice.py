"""A report has the warnings of a run, and what the rules find where the run recorded none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl.cli import main
from verl.report.advice import list_latest, read_advice
from verl.report.contents import read_run
from verl.tracking.run_folder import RunFolder, RunWarning

pytestmark = pytest.mark.unit


def write(folder: Path, name: str, records: list[dict[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def sick(step: int) -> dict[str, Any]:
    return {"step": step, "time": 100.0 + step, "actor/kl_loss": 9.0, "reward/mean": 0.5}


def list_advice(folder: Path) -> list[tuple[int, str]]:
    run = RunFolder(folder)
    return [(each.step, each.rule) for each in read_advice(run, run.read_metrics())]


def test_a_run_without_warnings_is_diagnosed_from_its_metrics(tmp_path: Path) -> None:
    write(tmp_path, "metrics", [sick(step) for step in range(1, 60)])
    assert list_advice(tmp_path) == [(1, "kl-explosion"), (51, "kl-explosion")]
    [first, _] = read_run(RunFolder(tmp_path), 200.0)["warnings"]
    assert (first[0], first[1], first[3]) == (1, 101.0, "kl-explosion")
    assert "actor/kl_loss is 9" in first[2]
    assert "far from the reference" in read_run(RunFolder(tmp_path), 200.0)["rules"]["kl-explosion"]


def test_what_the_run_has_recorded_is_not_said_twice(tmp_path: Path) -> None:
    write(tmp_path, "metrics", [sick(step) for step in range(1, 120)])
    own = {"step": 30, "time": 130.0, "text": "too fast", "rule": "kl-explosion"}
    write(tmp_path, "warnings", [{"step": 2, "time": 102.0, "text": "hint"}, own])
    assert list_advice(tmp_path) == [(2, ""), (30, "kl-explosion"), (101, "kl-explosion")]


def test_the_command_prints_the_last_warning_of_each_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "metrics", [sick(step) for step in range(1, 60)])
    assert main(["report", str(tmp_path)]) == 0
    [_, line] = capsys.readouterr().out.splitlines()
    assert line.startswith("  ! step 51, 2 times: the policy changes too fast")
    assert line.endswith("(verl explain kl-explosion)")


def test_warnings_without_a_rule_are_counted_by_their_text() -> None:
    advice = [RunWarning(step, 0.0, text) for step, text in ((1, "a"), (2, "b"), (3, "a"))]
    assert [(each.step, count) for each, count in list_latest(advice)] == [(3, 2), (2, 1)]
