"""Losses are reported and counted; a run without progress is not restarted forever."""

from itertools import pairwise
from typing import Any

import pytest

from verl.config.schema.trainer import FaultsConfig
from verl.errors import ProcessLostError
from verl.rollout.supervisor import EngineEvent, EngineState
from verl.trainer.restarts import RestartTracker

pytestmark = pytest.mark.unit

GONE = ProcessLostError("train worker 1: update: its process has died")


class Lines:
    """A console that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    advice = note


def faults(**settings: Any) -> tuple[RestartTracker, list[str]]:
    console: Any = Lines()
    return RestartTracker(console, FaultsConfig(**settings)), console.lines


def test_a_run_without_restarts_has_no_metrics_of_restarts() -> None:
    assert faults()[0].metrics() == {}


def test_a_restart_says_what_was_lost_and_what_it_costs() -> None:
    run, lines = faults()
    run.restart(GONE, version=7)
    run.resumed(5)
    assert "train worker 1: update: its process has died" in lines[0]
    assert lines[1:] == ["repeating 2 steps"]
    assert run.has_restarted
    assert run.metrics()["faults/run_restarts"] == 1
    assert run.metrics()["faults/steps_repeated"] == 2


def test_a_run_that_saved_nothing_says_why_it_starts_over() -> None:
    run, lines = faults()
    run.restart(GONE, version=3)
    run.resumed(0)
    assert lines[1] == "repeating 3 steps: no checkpoint was written yet (trainer.save_freq)"


def test_a_resumed_run_without_repeated_steps_prints_nothing() -> None:
    run, lines = faults()
    run.resumed(12)
    assert lines == []
    assert run.metrics() == {}


def test_restarts_in_a_row_are_bounded_and_a_step_forward_forgives_them() -> None:
    run, _ = faults(max_restarts=2)
    for version in (4, None, 6, 5):
        run.restart(GONE, version)
    with pytest.raises(ProcessLostError, match="train worker 1"):
        run.restart(GONE, version=6)


def test_max_restarts_of_zero_allows_no_restart() -> None:
    with pytest.raises(ProcessLostError):
        faults(max_restarts=0)[0].restart(GONE, version=1)


def test_lost_and_restarted_engines_are_reported() -> None:
    run, lines = faults()
    path = [
        EngineState.READY,
        EngineState.LOST,
        EngineState.RESTARTING,
        EngineState.SYNCING,
        EngineState.PROBING,
        EngineState.READY,
    ]
    for before, now in pairwise(path):
        run.engine(EngineEvent(1, before, now, "its process has died" if now is EngineState.LOST else "", 34.0))
    assert [line.split(":")[0] for line in lines] == [
        "rollout engine 1 is lost after 34 s (was ready)",
        "rollout engine 1 is ready again after 34 s",
    ]
    assert run.metrics()["faults/engine_restarts"] == 1
    assert run.metrics()["faults/engine_seconds_lost"] == 34
