"""All ranks as one: what is asked of them, and when."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from verl.cluster.group import ActorGroup
from verl.cluster.hangs.pending_calls import PENDING_CALLS
from verl.errors import ProcessLostError
from verl.workers.train import PolicyGroup, TrainWorker

pytestmark = pytest.mark.unit


class Rank:
    """An actor that prepares until it is let go, and packs at once."""

    def __init__(self) -> None:
        self.let_go, self.asked = asyncio.Event(), list[str]()
        self.error: Exception | None = None
        self.__ray_call__ = SimpleNamespace(remote=lambda *_: None)

    async def _prepare(self, plan: Any) -> dict[str, float]:
        self.asked.append("prepare")
        await self.let_go.wait()
        if self.error is not None:
            raise self.error
        return {}

    async def _pack_weights(self) -> list[Any]:
        self.asked.append("pack_weights")
        return ["parcel"]

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(type(self), f"_{method}").__get__(self))


def group_of(*ranks: Rank) -> PolicyGroup:
    return PolicyGroup(ActorGroup("train worker", ranks))


PLAN: Any = SimpleNamespace(ranks=[None, None])


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_deadline_of_a_join_does_not_run_while_the_ranks_are_busy() -> None:
    ranks = Rank(), Rank()
    group = group_of(*ranks)
    preparing = asyncio.ensure_future(group.prepare(PLAN))
    await settled()
    packing = asyncio.ensure_future(group.pack_weights())
    await settled()
    assert {call.action for call in PENDING_CALLS.list_calls()} == {"prepare"}, (
        "a wait for weights would be at its end before theirs"
    )
    assert ranks[0].asked == ["prepare"]
    for rank in ranks:
        rank.let_go.set()
    assert await packing == ["parcel"]
    assert await preparing == {}
    assert ranks[0].asked == ["prepare", "pack_weights"]


async def test_ranks_that_fail_are_asked_again() -> None:
    ranks = Rank(), Rank()
    group = group_of(*ranks)
    ranks[1].error = ProcessLostError("train worker 1: prepare: its process has died")
    for rank in ranks:
        rank.let_go.set()
    with pytest.raises(ProcessLostError):
        await group.prepare(PLAN)
    assert await group.pack_weights() == ["parcel"]


def test_the_port_where_rank_0_is_met_is_taken_from_the_moment_it_is_told() -> None:
    first, second = TrainWorker(0, 2), TrainWorker(1, 2)
    assert second.address() is None
    address = first.address()
    assert address is not None
    with pytest.raises(OSError, match="in use"):
        socket.create_server(address)
    with socket.create_connection(address, timeout=5):
        pass  # who comes before the ranks have imported torch waits in the line
