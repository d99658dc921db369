"""The phases of a worker: rows with its name, and one row for what continues."""

from __future__ import annotations

import pytest

from verl.tracking.phases import PhaseTimes

pytestmark = pytest.mark.unit


def test_phases_are_rows_with_the_worker_and_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1, 100))
    monkeypatch.setattr("verl.tracking.phases.time.time", lambda: float(next(clock)))
    times = PhaseTimes("train 3")
    with times.measure("prepare"):
        pass
    for _ in range(2):
        with times.measure("sync", continues=True):
            pass
    with pytest.raises(ValueError, match="broken"), times.measure("sync"):
        raise ValueError("broken")
    assert times.take() == [
        ["train 3", "prepare", 1.0, 2.0],
        ["train 3", "sync", 3.0, 6.0],
        ["train 3", "sync", 7.0, 8.0],
    ]
    assert times.take() == []
