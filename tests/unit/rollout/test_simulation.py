"""The simulation repeats exactly, and it can fail: logic that is wrong on purpose breaks a promise."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import simulated_run
from simulated_clock import Deadlock, simulate
from simulated_engines import SimulatedEngine
from simulated_run import Violation, run_seed

from verl.rollout import replica_pool as pool
from verl.rollout.replica_pool import EnginePool
from verl.rollout.supervisor import EngineSlot, EngineState, EngineSupervisor
from verl.trainer.buffer.admission import Admission
from verl.trainer.buffer.episode_buffer import EpisodeBuffer
from verl.trainer.buffer.groups import Group
from verl.trainer.buffer.selection import Selection
from verl.types import Completion, SamplingParams
from verl.weights import sync
from verl.weights.sync import WeightSync

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("seed", [1, 7, 15])
def test_a_seed_repeats_exactly(seed: int) -> None:
    assert run_seed(seed) == run_seed(seed)


def test_the_first_seeds_keep_all_invariants() -> None:
    _run_seeds(0, 20)


def test_seeds_differ() -> None:
    assert run_seed(1).history != run_seed(7).history


def test_a_clock_without_anything_to_wait_for_is_a_deadlock() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        simulate(wait())


async def _nothing(*_: Any, **__: Any) -> None:
    """Instead of something that matters."""


async def _by_who_is_ready(self: EnginePool, requests: Sequence[pool.Request]) -> list[Completion]:
    count = max(1, list(self.states.values()).count(EngineState.READY))
    shares = [requests[place::count] for place in range(min(count, len(requests)))]
    answers = await asyncio.gather(*(self._generate_batch(share, place) for place, share in enumerate(shares)))
    return [answers[index % count][index // count] for index in range(len(requests))]


async def _the_last_one(self: Any, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
    answer = await _generate(self, token_ids, sampling)
    self.last, last = answer, getattr(self, "last", answer)
    return last


_generate = EnginePool.generate


async def _never(*_: Any) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def _whenever(self: WeightSync) -> AsyncIterator[None]:
    yield


def _what_is_finished(self: Selection, count: int, version: int) -> bool:
    return self.finished >= count


def _by_position(self: Selection, finished: Iterable[Group], count: int) -> list[Group]:
    return _take(self, sorted(finished, key=lambda group: -group.position)[:count], count)


_take = Selection.take


def _one_more(self: Admission, unseen: int) -> bool:
    return self._started <= self._limit and unseen < self._reach


def _without_what_is_done(self: EpisodeBuffer) -> dict[str, Any]:
    return self._stream.state() | {"position": self.position}


def _as_the_stream(self: EpisodeBuffer) -> dict[str, Any]:
    return self._stream.state()


async def _start_at_any_time(self: EngineSupervisor, slot: EngineSlot) -> None:
    self._may_start.set()
    await _start_process(self, slot)


_start_process = EngineSupervisor._start_process


def _in_the_view_at_once(self: EngineSupervisor, spawn: Callable[[int], Any]) -> int:
    engine_id = _add(self, spawn)
    self._publish({**self.view.engines, engine_id: self.engines[-1]})
    return engine_id


_add = EngineSupervisor.add
TRIES = 300

MUTANTS = {  # what is replaced, by what, the promise that it breaks, and a seed from which on that is seen soon
    "a pool that does not run again": (pool, "MAX_LOSSES", 1, "fewer losses", 0),
    "a pool that mixes up answers": (EnginePool, "generate", _the_last_one, "answer to another", 0),
    "a pool that takes nobody back": (
        EnginePool,
        "_recover_and_use",
        _nothing,
        "recovered|does not see",
        0,
    ),
    "a pool that cuts batches by who is ready": (EnginePool, "generate_all", _by_who_is_ready, "without faults", 10),
    "a hang that is not reported": (SimulatedEngine, "disable", _nothing, "fewer losses", 226),
    "a supervisor that does not hear of losses": (EngineSupervisor, "mark_lost", lambda *_: None, "the run ended", 0),
    "a supervisor that does not ask": (
        EngineSupervisor,
        "_send_heartbeats",
        _never,
        "recovered|does not see",
        0,
    ),
    "a supervisor that does not wait for the end of the lost": (
        EngineSupervisor,
        "wait_for_stale_exit",
        _nothing,
        "a response of version|an engine that sleeps",
        474,
    ),
    "a pool that does not learn that engines left": (
        EnginePool,
        "_forget",
        lambda *_: None,
        "which has left|does not see",
        0,
    ),
    "a pool that does not learn that engines joined": (
        EnginePool,
        "update",
        _nothing,
        "does not see|which has left",
        0,
    ),
    "engines that get requests before they are ready": (
        EngineSupervisor,
        "add",
        _in_the_view_at_once,
        "which has not joined yet",
        0,
    ),
    "a supervisor that lets no engine sleep": (EngineSupervisor, "free_devices", _nothing, "parts of a device", 0),
    "a supervisor that starts engines at any time": (
        EngineSupervisor,
        "_start_process",
        _start_at_any_time,
        "parts of a device",
        0,
    ),
    "a weight sync that does not compare": (
        WeightSync,
        "_compare",
        lambda *_: (0.0, {}),
        "labelled|known wrong|not verified",
        0,
    ),
    "a weight sync that lets join at any time": (WeightSync, "updating", _whenever, "different weights", 3),
    "a weight sync that sends what has diverged": (sync, "_check_finite", lambda *_: None, "no engine was wrong", 39),
    "a buffer that trusts an engine known wrong": (EpisodeBuffer, "discard_from", lambda *_: None, "known wrong", 34),
    "a cluster that nobody watches": (simulated_run, "wait_for_loss", _never, "nobody noticed", 10),
    "a buffer that forgets what is on its way": (EpisodeBuffer, "state", _as_the_stream, "a checkpoint is wrong", 0),
    "a buffer that forgets what is done": (EpisodeBuffer, "state", _without_what_is_done, "a checkpoint is wrong", 0),
    "a buffer that takes whatever is finished": (Selection, "can_take", _what_is_finished, "a response of version", 0),
    "a buffer that takes what has started last": (Selection, "take", _by_position, "does not end", 0),
    "a buffer that starts one more": (Admission, "may_start", _one_more, "a response of version|does not end", 2),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_logic_breaks_an_invariant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, wrong, promise, first = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(Violation, match=promise):
        _run_seeds(first, TRIES)


def _run_seeds(first: int, count: int) -> None:
    for seed in range(first, first + count):
        run_seed(seed)
