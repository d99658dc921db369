"""Reading a run's folder: what is missing, truncated or damaged, and what a run writes in one piece or several."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import BEGAN, Size, write_run

from verl.errors import DataError, VerlError
from verl.tracking.run_folder import Phase, RunFolder, RunWarning, Setting

pytestmark = pytest.mark.unit


def make(folder: Path, **files: list[Any]) -> RunFolder:
    """Write NAME.jsonl from records; texts are written as they are."""
    files = {"metrics": [], **files}
    for name, records in files.items():
        lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return RunFolder(folder)


def test_a_folder_without_records_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(VerlError, match=r"is not the folder of a run. Give the folder that trainer.default_local_dir"):
        RunFolder(tmp_path)
    with pytest.raises(VerlError, match="no such folder"):
        RunFolder(tmp_path / "missing")


def test_an_empty_run_has_nothing(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert (run.read_metrics(), run.read_warnings(), run.read_starts(), run.read_settings()) == ([], [], [], [])
    assert (run.read_phases(), run.list_samples()) == ({}, [])
    state = run.read_state(1e9)
    assert (state.step, state.total_steps, state.time) == (0, None, None)


def test_the_records_of_a_step_are_merged(tmp_path: Path) -> None:
    records = [
        {"step": 2, "time": 30.0, "reward/mean": 0.5},
        {"step": 1, "time": 10.0, "reward/mean": 0.25, "actor/grad_norm": "NaN", "x": "-Infinity", "note": "text"},
        {"step": 2, "time": 31.0, "val/sums/mean@1": 1},
    ]
    first, second = make(tmp_path, metrics=records).read_metrics()
    assert math.isnan(first.values["actor/grad_norm"])
    assert first.values["x"] == -math.inf
    assert "note" not in first.values
    assert (second.step, second.time, second.values) == (2, 31.0, {"reward/mean": 0.5, "val/sums/mean@1": 1.0})


def test_lines_that_are_not_records_are_skipped(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "time": 1.0, "a": 2.0},
        "[1]",
        "null",
        '{"time": 1}',
        '{"step": "1"}',
        "",
        '{"step": 2, "a": 3',
    ]
    assert [each.step for each in make(tmp_path, metrics=lines).read_metrics()] == [1]
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "a": 2.0}\n{"step": 2, "b\xc3')
    assert [each.step for each in RunFolder(tmp_path).read_metrics()] == [1]


def test_warnings_starts_and_phases(tmp_path: Path) -> None:
    run = make(
        tmp_path,
        warnings=[{"step": 3, "time": 5.0, "text": "slow"}, {"step": 4, "time": 6.0}],
        starts=[
            {
                "step": 0,
                "time": 1.0,
                "command": "verl train",
                "settings": {"a.b": {"value": [1, None], "origin": "command line"}, "c": {"value": "x"}, "d": 3},
                "environment": {"versions": {"torch": 2}, "odd": []},
            },
            {"step": 7},
        ],
        phases=[{"step": 1, "phases": [["train 0", "gen", 1, 2.5], ["short"], ["a", "b", "c", "d"]]}, {"step": 2}],
    )
    assert run.read_warnings() == [RunWarning(3, 5.0, "slow")]
    first, second = run.read_starts()
    assert first.settings == [Setting("a.b", "[1, null]", "command line"), Setting("c", "x", "")]
    assert first.environment == {"versions": {"torch": "2"}}
    assert (second.step, second.command, second.settings) == (7, "", [])
    assert run.read_phases() == {1: [Phase("train 0", "gen", 1.0, 2.5)], 2: []}


def test_settings_keep_their_order_their_text_and_their_origin(tmp_path: Path) -> None:
    run = make(tmp_path)
    (tmp_path / "settings.yaml").write_text(
        'data:          # section\n  files: [a, "b # c"]  # command line\n  key: "x"  # file.yaml, line 3\n'
        "  open: {}  # default\n  rows:  # default\n  - 1\n  - 2\nlr: 1.0e-06  # default\n"
    )
    assert run.read_settings() == [
        Setting("data.files", '[a, "b # c"]', "command line"),
        Setting("data.key", "x", "file.yaml, line 3"),
        Setting("data.open", "{}", "default"),
        Setting("data.rows", "- 1 - 2", ""),
        Setting("lr", "1.0e-06", "default"),
    ]
    (tmp_path / "settings.yaml").write_text("data: [1\n")
    assert run.read_settings() == []


@pytest.mark.parametrize(
    ("now", "total", "name"), [(100.0, None, "running"), (1e6, None, "stopped"), (100.0, 2, "finished")]
)
def test_state(tmp_path: Path, now: float, total: int | None, name: str) -> None:
    start = {"step": 0, "time": 1.0, "total_steps": total}
    run = make(tmp_path, metrics=[{"step": 2, "time": 90.0, "timing_s/step": 10.0}], starts=[start])
    state = run.read_state(now)
    assert (state.name, state.step, state.total_steps, state.time) == (name, 2, total, 90.0)


def test_a_slow_step_is_not_a_stopped_run(tmp_path: Path) -> None:
    run = make(tmp_path, metrics=[{"step": 1, "time": 100.0, "timing_s/step": 3_600.0}])
    assert run.read_state(100.0 + 4 * 3_600).name == "running"
    assert run.read_state(100.0 + 6 * 3_600).name == "stopped"


def test_samples_are_listed_by_step_and_read_by_column(tmp_path: Path) -> None:
    write_run(tmp_path, Size(2, 1, 3, 2), is_killed=True)
    (tmp_path / "samples" / "val_00000003.parquet").write_bytes(b"PAR1")
    run = RunFolder(tmp_path)
    files = run.list_samples()
    assert [(file.split, file.step) for file in files] == [("train", 1), ("train", 2), ("val", 2), ("val", 3)]
    assert run.read_samples(files[0], ["score", "missing"]).column_names == ["score"]
    assert run.read_samples(files[2]).num_rows == 3
    with pytest.raises(DataError, match=r"val_00000003.parquet: cannot be read"):
        run.read_samples(files[3])


def test_the_files_of_a_killed_run_are_read_up_to_their_last_line(tmp_path: Path) -> None:
    write_run(tmp_path, Size(4, 1, 1, 2), is_killed=True)
    run = RunFolder(tmp_path)
    assert [each.step for each in run.read_metrics()] == [1, 2, 3, 4]
    assert len(run.read_warnings()) == 2
    assert sorted(run.read_phases()) == [1, 2, 3, 4]
    assert [start.step for start in run.read_starts()] == [0, 2]
    assert run.read_state(BEGAN).total_steps == 4
