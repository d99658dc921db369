"""Starting or joining Ray: a slow machine gets a second try, and what went wrong is said with the mend."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from verl.cluster.session import connect
from verl.errors import EngineError

pytestmark = pytest.mark.unit


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every start."""
    made: list[dict[str, Any]] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return made


def failing(monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]], times: int) -> None:
    def init(**arguments: Any) -> None:
        starts.append(arguments)
        if len(starts) <= times:
            raise Exception("The current node timed out during startup.")  # as Ray raises it

    monkeypatch.setattr(ray, "init", init)


def test_a_start_that_was_too_slow_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]]
) -> None:
    failing(monkeypatch, starts, times=1)
    connect({"num_cpus": 2})
    assert [start["num_cpus"] for start in starts] == [2, 2]


def test_a_machine_that_cannot_start_ray_is_told_what_to_look_at(
    monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]]
) -> None:
    failing(monkeypatch, starts, times=9)
    with pytest.raises(EngineError, match=r"timed out during startup.\n.*out of space in /tmp"):
        connect({})


@pytest.mark.parametrize("by", ["setting", "environment"])
def test_a_cluster_that_does_not_answer_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, starts: list[dict[str, Any]], by: str
) -> None:
    failing(monkeypatch, starts, times=9)
    if by == "environment":
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(EngineError, match=r"a cluster running at head:6379 .*ray start --head"):
        connect({"address": "head:6379"} if by == "setting" else {})
    assert len(starts) == 1
