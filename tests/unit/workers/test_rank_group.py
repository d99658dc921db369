"""Calls to all ranks of a group."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_clock import simulate

from verl.cluster.hangs.pending_calls import DEFAULT_TIMEOUTS, PENDING_CALLS
from verl.errors import ProcessLostError
from verl.tracking.phases import PHASES
from verl.workers.rank_speed import PROBE_S
from verl.workers.train import PolicyGroup, TrainWorker

pytestmark = pytest.mark.unit


class Rank:
    """An actor whose `prepare` returns when it is released, `gather_weights` when rank 0 has finished."""

    finished: asyncio.Event

    def __init__(self) -> None:
        self.released, self.calls = asyncio.Event(), list[str]()
        self.error: Exception | None = None
        self.metrics: dict[str, Any] = {}
        self.__ray_call__ = SimpleNamespace(remote=lambda *_: None)

    async def _prepare(self, plan: Any) -> dict[str, Any]:
        self.calls.append("prepare")
        await self.released.wait()
        if self.error is not None:
            raise self.error
        return self.metrics

    async def _pack_bucket(self, is_first: bool) -> str | None:
        self.calls.append("pack_bucket")
        return "bucket" if is_first else None

    async def _finish_buckets(self) -> dict[str, Any]:
        self.calls.append("finish_buckets")
        self.finished.set()
        return {PHASES: [["train 0", "sync", 5.0, 6.0]]}

    async def _gather_weights(self) -> dict[str, Any]:
        self.calls.append("gather_weights")
        if self.error is not None:
            raise self.error
        await self.finished.wait()
        return {PHASES: [["train 1", "sync", 5.0, 7.0]]}

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(type(self), f"_{method}").__get__(self))


def group_of(*ranks: Rank) -> PolicyGroup:
    finished = asyncio.Event()
    for rank in ranks:
        rank.finished = finished
    return PolicyGroup(ranks)


async def pack(group: PolicyGroup) -> list[Any]:
    return [bucket async for bucket in group.pack_weights()]


PLAN: Any = SimpleNamespace(ranks=[None, None])


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_slowest_rank_is_a_metric_of_the_step() -> None:
    ranks = Rank(), Rank()
    for rank, seconds in zip(ranks, (0.1, 0.4), strict=True):
        rank.metrics = {PROBE_S: seconds, "actor/kl": seconds}
        rank.released.set()
    metrics = await group_of(*ranks).prepare(PLAN)
    assert metrics == {PROBE_S: 0.1, "actor/kl": 0.1, "perf/slowest_rank": 1.0, "perf/slowest_rank_slowdown": 4.0}


async def test_a_timeout_starts_when_the_ranks_are_free() -> None:
    ranks = Rank(), Rank()
    group = group_of(*ranks)
    preparing = asyncio.ensure_future(group.prepare(PLAN))
    await settled()
    packing = asyncio.ensure_future(pack(group))
    await settled()
    assert {call.action for call in PENDING_CALLS.list_calls()} == {"prepare"}, (
        "the call for weights would time out first"
    )
    assert ranks[0].calls == ["prepare"]
    for rank in ranks:
        rank.released.set()
    assert await packing == ["bucket"]
    assert await preparing == {}
    assert ranks[0].calls == ["prepare", "pack_bucket", "pack_bucket", "finish_buckets"]
    assert ranks[1].calls == ["prepare", "gather_weights"], "one call, whatever the number of buckets"


async def test_ranks_can_be_called_after_a_failure() -> None:
    ranks = Rank(), Rank()
    group = group_of(*ranks)
    ranks[1].error = ProcessLostError("train worker 1: prepare: its process has died")
    for rank in ranks:
        rank.released.set()
    with pytest.raises(ProcessLostError):
        await group.prepare(PLAN)
    ranks[1].error = None
    assert await pack(group) == ["bucket"]


async def test_the_phases_of_all_ranks_are_kept_apart_from_metrics() -> None:
    ranks = Rank(), Rank()
    group = group_of(*ranks)
    for index, rank in enumerate(ranks):
        rank.metrics = {"actor/loss": 0.5, PHASES: [[f"train {index}", "prepare", 1.0, 2.0]]}
        rank.released.set()
    assert await group.prepare(PLAN) == {"actor/loss": 0.5}
    await pack(group)
    assert [row[:2] for row in group.take_phases()] == [
        ["train 0", "prepare"],
        ["train 1", "prepare"],
        ["train 0", "sync"],
        ["train 1", "sync"],
    ]
    assert group.take_phases() == []


async def test_other_ranks_are_not_left_in_a_collective_when_packing_stops_early() -> None:
    ranks = Rank(), Rank()
    group = group_of(*ranks)
    async with aclosing(group.pack_weights()) as buckets:
        async for _ in buckets:
            break
    assert ranks[0].calls[-1] == "finish_buckets"
    assert not PENDING_CALLS.list_calls()


async def test_other_ranks_are_not_left_in_a_collective_when_the_sync_is_cancelled_at_once() -> None:
    ranks = Rank(), Rank()
    packing = asyncio.ensure_future(pack(group_of(*ranks)))
    await asyncio.sleep(0)
    packing.cancel()
    await asyncio.wait([packing])
    assert packing.cancelled()
    assert ranks[0].calls == ["pack_bucket", "finish_buckets"]
    assert not PENDING_CALLS.list_calls()


def test_ranks_that_gather_wait_longer_than_an_engine_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PENDING_CALLS, "clock", lambda: asyncio.get_running_loop().time())

    async def load_slowly() -> list[Any]:
        buckets = []
        async for bucket in group_of(Rank(), Rank()).pack_weights():
            await asyncio.sleep(DEFAULT_TIMEOUTS.weights.seconds + 30)  # until the engine is lost, with a report
            buckets.append(bucket)
        return buckets

    assert simulate(load_slowly()) == ["bucket"], "the engine is lost alone"


async def test_the_loss_of_a_rank_that_gathers_is_raised_while_rank_0_waits_for_it() -> None:
    ranks = Rank(), Rank()
    group = group_of(*ranks)
    stuck = asyncio.Event()
    ranks[0].__dict__["pack_bucket"] = SimpleNamespace(remote=lambda is_first: stuck.wait())
    ranks[1].error = ProcessLostError("train worker 1: gather_weights: its process has died")
    with pytest.raises(ProcessLostError, match="train worker 1"):
        await pack(group)
    await settled()
    assert not PENDING_CALLS.list_calls()


def test_rank_0_listens_as_soon_as_its_port_is_known() -> None:
    first, second = TrainWorker(0, 2), TrainWorker(1, 2)
    assert second.address() is None
    address = first.address()
    assert address is not None
    with pytest.raises(OSError, match="in use"):
        socket.create_server(address)
    with socket.create_connection(address, timeout=5):
        pass  # ranks that connect early wait in the backlog
