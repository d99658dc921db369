"""The phases of the steps on Ray's timeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl.tracking.run_folder import Phase
from verl.trainer.records.timeline import add_phases

pytestmark = pytest.mark.unit

RAY = [
    {"cat": "task::TrainWorker.update", "name": "update", "pid": 1, "tid": 4, "ts": 100e6, "dur": 5e6, "ph": "X"},
    {"ph": "M", "name": "process_name", "pid": 1, "tid": None, "args": {"name": "Node 127.0.0.1"}},
]


def test_phases_are_a_process_of_their_own_with_a_thread_for_each_worker(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(RAY))
    before_a_restart = Phase("train 0", "update", 10.0, 12.0)
    add_phases(
        path, [before_a_restart, Phase("controller", "gen", 99.0, 101.5), Phase("train 0", "update", 101.5, 104.0)]
    )
    events = json.loads(path.read_text())
    assert events[:2] == RAY
    spans = {event["name"]: event for event in events if event.get("cat") == "verl"}
    assert (spans["gen"]["ts"], spans["gen"]["dur"]) == (99e6, 2.5e6)
    assert (spans["update"]["ts"], spans["update"]["dur"]) == (101.5e6, 2.5e6)
    names = {(event["pid"], event.get("tid")): event["args"]["name"] for event in events[2:] if event["ph"] == "M"}
    assert names == {(2, None): "verl: phases of the steps", (2, 0): "controller", (2, 1): "train 0"}
    assert {spans["gen"]["pid"], spans["update"]["pid"]} == {2}
    assert (spans["gen"]["tid"], spans["update"]["tid"]) == (0, 1)


def test_without_events_of_ray_there_are_only_phases(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text("[]")
    add_phases(path, [Phase("controller", "gen", 1.0, 2.0)])
    assert [event["name"] for event in json.loads(path.read_text())] == ["gen", "process_name", "thread_name"]
