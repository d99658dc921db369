"""A group names the rank that died, even if errors of others arrive first."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_clock import simulate

from verl.cluster.actors import ActorGroup
from verl.cluster.hangs.pending_calls import DEFAULT_TIMEOUTS
from verl.errors import ProcessLostError

pytestmark = pytest.mark.unit

Part = Callable[[], Coroutine[Any, Any, int]]


def group_of(*parts: Part) -> ActorGroup:
    silent = SimpleNamespace(remote=lambda *_: None)
    actors = [SimpleNamespace(update=SimpleNamespace(remote=part), __ray_call__=silent) for part in parts]
    return ActorGroup("train worker", actors)


async def works() -> int:
    return 1


async def fails() -> int:
    raise RuntimeError("Connection closed by peer")


async def dies() -> int:
    await asyncio.sleep(8)
    raise ProcessLostError("train worker 1: update: its process has died")


async def is_stuck() -> int:
    await asyncio.sleep(10_000)
    return 1


def call(*parts: Part) -> list[int]:
    return simulate(group_of(*parts).call("update", timeout=DEFAULT_TIMEOUTS.train))


def test_replies_are_in_the_order_of_the_ranks() -> None:
    assert call(works, works) == [1, 1]


def test_the_death_of_a_rank_is_raised_although_another_failed_first() -> None:
    with pytest.raises(ProcessLostError, match="train worker 1"):
        call(fails, dies)


def test_an_error_without_a_death_is_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match="closed by peer"):
        call(fails, is_stuck)
