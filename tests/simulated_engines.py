"""Simulated engines and a simulated trained model, with everything that can go wrong with them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import numpy as np

from verl.errors import EngineError, ProcessLostError
from verl.rollout.replica_pool import Request
from verl.types import Completion, SamplingParams

__all__ = ["DEVICE", "LONGEST_S", "TRAINING", "Fate", "Process", "SimulatedEngine", "SimulatedModel", "answer_to"]

T = TypeVar("T")

LONGEST_S = 40_000.0  # of a run; those that end take a few hundred to a few thousand
SYNC_S = 300.0
GARBAGE = 1e6  # the weights of a new process
DEVICE, WEIGHTS, CACHE = 10, 3, 4  # memory, in parts: of a device, of the weights and the cache of an engine
BUCKETS = 3  # of the weights
TRAINING, SENDING = 8, 2  # of the trainer, while it trains, and while it packs or probes weights


class Fate(Protocol):
    """Decides what happens to them."""

    draw: random.Random
    token_s: float  # to write one, on average
    broken: Sequence[int]  # engines that never start again
    is_synchronous: bool  # no request runs while the model is trained

    def slowness(self, token_ids: Sequence[int]) -> float:
        """Return how many times as long as others the response to a request takes."""
        ...

    def delay(self) -> float:
        """Return the seconds that one message takes."""
        ...

    def may_fail(self, chance: float) -> bool:
        """Whether something goes wrong now; a bounded number of times."""
        ...

    async def maybe_die(self, process: Process, where: str) -> None: ...

    def check_memory(self) -> None:
        """Whether engines and trainer fit on their devices together."""
        ...

    def check(self, holds: bool, otherwise: str) -> None:
        """What must hold; else the run has broken a promise."""
        ...


class Process:
    """One life of an engine's process. What it is asked to do goes on when the one who asked has gone."""

    def __init__(self, fate: Fate, number: int) -> None:
        self._fate, self.number = fate, number
        self.is_alive, self.is_started, self.is_enabled, self.hangs = True, False, False, False
        self.is_deaf = self.mislabels = self.is_cut_off = self.dies_when_it_loads = False
        self.error = 0.0  # of all its log-probs, another one for each process that has gone wrong
        self.was_probed_wrong = False
        self.slowness = 1.0
        self.weights, self.version, self.verified_weights = GARBAGE, -1, GARBAGE
        self.loaded: list[float] | None = None  # the buckets of an update that has begun
        self.memory = 0  # of its device, in parts of it
        self.is_awake = asyncio.Event()
        self.is_awake.set()
        self.loading = asyncio.Lock()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    async def work(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self.slowness)
        await self._thawed.wait()

    def occupy(self, memory: int) -> None:
        """Use this much memory of the device from now on."""
        self.memory = memory
        self._fate.check_memory()

    def die(self) -> None:
        self.memory = 0
        self.is_alive = self.is_enabled = False
        for task in list(self._tasks):
            task.cancel()

    def freeze(self, seconds: float) -> None:
        self._thawed.clear()
        asyncio.get_running_loop().call_later(seconds, self._thawed.set)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            task.exception()


class SimulatedEngine:
    """A handle that stays while processes come and go: what `RemoteEngine` and `RolloutActor` are on a cluster."""

    def __init__(self, fate: Fate, number: int, *, is_started: bool = True) -> None:
        self._fate, self.number = fate, number
        self.process = Process(fate, number)
        if is_started:
            self.process.is_started = True
            self.process.memory = WEIGHTS + CACHE
        self.failures = 0
        self.has_joined, self.has_left = is_started, False
        self.was_wrong = False  # one of its processes had wrong weights or results
        self.is_reachable = asyncio.Event()  # by the controller
        self.is_reachable.set()

    def as_seen_by_workers(self) -> WorkersView:
        """The same engine without what may lie between it and the controller."""
        return WorkersView(self)

    def check_present(self) -> None:
        self._fate.check(self.has_joined, f"a request was sent to engine {self.number}, which has not joined yet")
        self._fate.check(not self.has_left, f"a request was sent to engine {self.number}, which has left")

    def part(self, seconds: float) -> None:
        """Cut it off from the controller; it lives on, and workers reach it."""
        self.is_reachable.clear()
        asyncio.get_running_loop().call_later(seconds, self.is_reachable.set)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        async def answer(process: Process) -> Completion:
            _demand(process.is_enabled, "disabled")
            is_awake = process.memory == WEIGHTS + CACHE
            self._fate.check(is_awake or not self._fate.is_synchronous, "a request was sent to an engine that sleeps")
            tokens = answer_to(token_ids, sampling)
            weights, versions = [], []
            token_s = self._fate.token_s * self._fate.slowness(token_ids)
            for _ in tokens:
                await process.work(self._fate.draw.expovariate(1 / token_s))
                await self._until_it_does_not_hang(process)
                await process.is_awake.wait()
                weights.append(process.weights + process.error)
                versions.append(process.version)
            return _completion(tokens, weights, versions)

        return await self._call(answer, None)

    async def generate_all(self, requests: Sequence[Request]) -> list[Completion]:
        async def answer(process: Process) -> list[Completion]:
            _demand(process.is_enabled, "disabled")
            self._fate.check(process.memory == WEIGHTS + CACHE, "requests were sent to an engine that sleeps")
            await process.work(self._fate.draw.expovariate(0.3 / self._fate.token_s))
            await self._until_it_does_not_hang(process)
            text = [(list(token_ids), sampling.seed) for token_ids, sampling in requests]
            draw = random.Random(f"{text} {process.weights}")  # all of a batch goes into every answer
            return [
                _completion([draw.randrange(100)] * n, [process.weights + process.error] * n, [process.version] * n)
                for n in (sampling.max_tokens for _, sampling in requests)
            ]

        return await self._call(answer, None)

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        async def answer(process: Process) -> list[list[float]]:
            _demand(process.is_started, "not started")
            await process.work(0.1)
            await self._fate.maybe_die(process, "probed")
            process.verified_weights = process.weights
            process.was_probed_wrong |= process.error != 0
            return [[process.weights + process.error - token for token in each[1:]] for each in sequences]

        return await self._call(answer, SYNC_S)

    async def start_weight_update(self) -> None:
        async def start(process: Process) -> None:
            _demand(process.is_started, "not started")
            async with process.loading:
                process.occupy(max(process.memory, WEIGHTS))
                await process.work(self._fate.delay())
                await self._fate.maybe_die(process, "waking")
                process.loaded = []

        await self._call(start, SYNC_S)

    async def load_bucket(self, bucket: float) -> None:
        async def load(process: Process) -> None:
            _demand(process.loaded is not None, "another process, in which no update has begun")
            _demand(not process.is_cut_off, "cannot reach the weights")
            async with process.loading:
                await process.work(self._fate.draw.expovariate(0.5 * BUCKETS))
                await self._fate.maybe_die(process, "loading")
                if process.dies_when_it_loads:
                    self.die()
                    await asyncio.sleep(0)
                await self._until_it_does_not_hang(process)
                assert process.loaded is not None
                process.loaded.append(bucket)

        await self._call(load, SYNC_S)

    async def finish_weight_update(self, version: int) -> None:
        async def finish(process: Process) -> None:
            _demand(process.loaded is not None, "another process, in which no update has begun")
            async with process.loading:
                await process.work(self._fate.draw.expovariate(1.0))
                await self._fate.maybe_die(process, "finishing")
                assert process.loaded is not None
                whole = len(process.loaded) == BUCKETS and len(set(map(str, process.loaded))) == 1
                self._fate.check(whole, f"an engine uses the parts {process.loaded} of different weights")
                if process.is_deaf or process.mislabels:
                    self.failures += 1
                if not process.is_deaf:
                    process.weights = process.loaded[0]
                process.loaded = None
                process.version = version - process.mislabels
                process.occupy(WEIGHTS + CACHE)
                process.is_awake.set()

        await self._call(finish, SYNC_S)

    async def sleep(self) -> None:
        async def sleep(process: Process) -> None:
            _demand(process.is_started, "not started")
            async with process.loading:
                await process.work(self._fate.delay())
                await self._fate.maybe_die(process, "falling asleep")
                await self._until_it_does_not_hang(process)
                process.is_awake.clear()
                process.memory = 0

        await self._call(sleep, SYNC_S)

    async def version(self) -> int:
        async def answer(process: Process) -> int:
            _demand(process.is_started, "not started")
            return process.version

        return await self._call(answer, SYNC_S)

    async def is_ready(self) -> bool:
        async def answer(process: Process) -> bool:
            return process.is_enabled

        return await self._call(answer, SYNC_S)

    async def enable(self, version: int) -> None:
        async def opening(process: Process) -> None:
            _demand(process.is_started and process.version == version, f"does not hold version {version}")
            await self._fate.maybe_die(process, "enabled")
            is_verified = process.verified_weights == process.weights and not process.was_probed_wrong
            self._fate.check(is_verified, "an engine is enabled whose weights were not verified")
            process.is_enabled = self.has_joined = True

        await self._call(opening, SYNC_S)

    async def disable(self, why: str) -> None:
        async def shutting(process: Process) -> None:
            process.is_enabled = False

        await self._call(shutting, SYNC_S)

    async def end(self) -> None:
        await asyncio.sleep(self._fate.delay() * 10)
        await self.is_reachable.wait()
        self.die()
        await asyncio.sleep(self._fate.delay())

    async def close(self) -> None:
        self.has_left = True
        await self.is_reachable.wait()
        self.process.die()

    async def start(self) -> None:
        draw = self._fate.draw
        self.process = process = Process(self._fate, self.number)
        will = draw.choice(["fail", "die", "hang", "be deaf", "mislabel"]) if self._fate.may_fail(0.3) else ""
        if self.number in self._fate.broken:
            will = "fail"
        process.is_deaf, process.mislabels = will == "be deaf", will == "mislabel"
        self.failures += will in ("fail", "die", "hang")
        self.was_wrong |= process.is_deaf or process.mislabels

        async def boot() -> None:
            process.occupy(WEIGHTS + CACHE)
            await process.work(draw.uniform(2, 20))
            if will == "fail":
                raise EngineError("it does not start")
            if will == "die":
                process.die()
            await process.work(LONGEST_S if will == "hang" else 0)
            process.is_started = True

        booting = process.run(boot())
        await asyncio.wait([booting])
        if booting.cancelled():
            raise ProcessLostError("it died while it started")
        booting.result()

    def die(self) -> None:
        """The process ends; sometimes the cluster puts a new one there, which nobody has started."""
        dead = self.process
        dead.die()
        if self._fate.draw.random() < 0.5:

            def replace_it() -> None:
                if self.process is dead and not self.has_left:
                    self.process = Process(self._fate, self.number)

            asyncio.get_running_loop().call_later(self._fate.delay(), replace_it)

    async def _call(self, ask: Callable[[Process], Coroutine[Any, Any, T]], timeout_s: float | None) -> T:
        await asyncio.sleep(self._fate.delay())
        if not _is_worker.get():
            await self.is_reachable.wait()
        process = self.process
        if not process.is_alive:
            raise ProcessLostError("there is no process")

        async def answer() -> T:
            await process.work(0)
            return await ask(process)

        task = process.run(answer())
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            raise ProcessLostError(f"no answer within {timeout_s} s")
        await asyncio.sleep(self._fate.delay())
        if task.cancelled() or (not process.is_alive and self._fate.draw.random() < 0.5):
            raise ProcessLostError("the process has died")  # in the second case it had done the work
        return task.result()

    async def _until_it_does_not_hang(self, process: Process) -> None:
        if process.hangs:
            await asyncio.get_running_loop().create_future()


_is_worker: ContextVar[bool] = ContextVar("_is_worker", default=False)


class WorkersView:
    """An engine as episode workers reach it, whatever the controller can reach."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._engine, name)

        async def call(*args: Any) -> Any:
            if name in ("generate", "generate_all"):
                self._engine.check_present()
            token = _is_worker.set(True)
            try:
                return await method(*args)
            finally:
                _is_worker.reset(token)

        return call


class SimulatedModel:
    """The trained weights: one number, another one after every update of every life."""

    def __init__(self, fate: Fate) -> None:
        self._fate = fate
        self.weights = 0.0
        self.is_up = True
        self.failures = 0
        self.memory = 0  # of each device

    async def pack_weights(self) -> AsyncGenerator[float, None]:
        for _ in range(BUCKETS):
            with self.using(SENDING):
                bucket = await self._steady(1.0 / BUCKETS)
            yield bucket

    @contextmanager
    def using(self, memory: int) -> Iterator[None]:
        """Use this much memory of each device inside the context."""
        self.memory += memory
        self._fate.check_memory()
        try:
            yield
        finally:
            self.memory -= memory

    async def send_weights(self, backend: str, receivers: Sequence[object], version: int) -> None:
        raise AssertionError("not this way")

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        weights = await self._steady(0.3)
        return [[weights - token for token in sequence[1:]] for sequence in sequences]

    async def compute(self, seconds: float) -> None:
        await asyncio.sleep(self._fate.draw.expovariate(1 / seconds))
        if not self.is_up:
            self.failures += 1
            raise ProcessLostError("a train worker has died")

    async def _steady(self, seconds: float) -> float:
        before = self.weights
        await self.compute(seconds)
        is_same = self.weights == before or math.isnan(before)
        self._fate.check(is_same, "the trained weights changed while they were packed or scored")
        return before


def answer_to(token_ids: Sequence[int], sampling: SamplingParams) -> list[int]:
    """Return the response to a request; it depends on the request alone."""
    draw = random.Random(f"{list(token_ids)} {sampling.seed}")
    return [draw.randrange(100) for _ in range(sampling.max_tokens)]


def _completion(tokens: list[int], weights: list[float], versions: list[int]) -> Completion:
    """Return a response whose log-probs are the negative weights that sampled the tokens, to be recognized by them."""
    return Completion(tokens, -np.array(weights), np.array(versions), "length")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ProcessLostError(otherwise)
