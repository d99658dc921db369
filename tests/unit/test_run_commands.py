"""`verl report`, `verl runs` and `verl compare` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_run import BEGAN, Size, write_run

from verl.cli import main
from verl.commands.runs.compare import describe_metric
from verl.commands.runs.runs import find_runs
from verl.tracking.run_folder import StepMetrics

pytestmark = pytest.mark.unit

STEPS = "trainer.total_training_steps"


def make_run(folder: Path, reward: float, **settings: object) -> Path:
    """Write a run of one step, of one in all if a setting says so, with these changed settings."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "time": BEGAN, "reward/mean": reward, "val/a/mean@1": 0.5, "val/b/mean@1": 1.0}) + "\n"
    )
    changed = {key: {"value": value, "origin": "command line"} for key, value in settings.items()}
    start = {"step": 0, "time": BEGAN, "settings": changed, "total_steps": settings.get(STEPS)}
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return folder


def test_report_writes_into_the_folder_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", Size(2, 1, 1, 2))
    assert main(["report", str(tmp_path / "run")]) == 0
    page = tmp_path / "run" / "report.html"
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert capsys.readouterr().out.startswith(f"{page}  (")
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "no such folder"),
        ([".", "--port", "80"], "--port needs --serve"),
        ([".", "--serve", "--output", "x"], "--output cannot be used with --serve"),
    ],
)
def test_wrong_arguments_of_report(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_report_says_that_its_output_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", 0.5)
    assert main(["report", str(run), "--output", str(tmp_path / "none" / "x.html")]) == 2
    assert "cannot be written: No such file or directory. Choose another --output" in capsys.readouterr().err


def test_runs_lists_the_latest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "project" / "first", 0.25)
    second = make_run(tmp_path / "second", 0.75, **{STEPS: 1})
    with (second / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "time": BEGAN + 9, "timing_s/save": 1.0}) + "\n")
    assert main(["runs", str(tmp_path)]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split() == ["run", "state", "steps", "reward", "validation", "last", "record"]
    assert [line.split()[0] for line in lines] == ["second", "project/first"]
    assert lines[0].split()[1:7] == ["finished", "1", "of", "1", "0.750", "0.750"]
    assert main(["runs", str(second)]) == 0
    assert "second" in capsys.readouterr().out


def test_runs_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / ".hidden" / "run", 0.5)
    make_run(tmp_path / "a/b/c/d/e/f", 0.5)
    assert list(find_runs(tmp_path)) == []
    assert main(["runs", str(tmp_path)]) == 1
    assert main(["runs", str(tmp_path / "missing")]) == 2


def test_compare_prints_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = make_run(tmp_path / "first", 0.25, lr=1e-6, seed=1)
    second = make_run(tmp_path / "second", 0.75, lr=2e-6, seed=1, n=8)
    assert main(["compare", str(first), str(second)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["lr", "1.0e-06", "2.0e-06"] in rows
    assert ["n", "-", "8"] in rows
    assert not any(row[:1] == ["seed"] for row in rows)
    assert ["reward/mean", "0.25", "0.25", "at", "1", "0.75", "0.75", "at", "1"] in rows
    assert main(["compare", str(first), str(second), "--metrics", "val/b*"]) == 0
    assert "reward/mean" not in capsys.readouterr().out


def test_the_best_value_depends_on_the_metric() -> None:
    def describe(name: str, *values: float) -> tuple[str, str]:
        return describe_metric([StepMetrics(step, 0.0, {name: value}) for step, value in enumerate(values)], name)

    assert describe("reward/mean", 0.5, 0.75, 0.25) == ("0.25", "0.75 at 1")
    assert describe("val/loss", 0.5, 0.75, 0.25) == ("0.25", "0.25 at 2")
    assert describe("actor/entropy", 0.5, 0.25) == ("0.25", "-")
    assert describe("reward/mean", float("nan")) == ("nan", "-")
    assert describe_metric([], "reward/mean") == ("-", "-")
