"""A cluster that is not there: actors of any number that reply after simulated seconds, around a real controller.

As with Ray, arguments and replies are pickled: the controller pays for what it sends and for what it reads. What the
actors do themselves is subtracted (`Cluster.outside_s`). Ray's own work, sockets and schedulers, is not in it.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from verl.tracking.phases import PHASES
from verl.types import SampleHandle
from verl.workers.episodes import EpisodeWorker, GroupRequest
from verl.workers.rollout import RolloutActor

__all__ = ["Cluster"]

CALL_S = 0.01  # simulated seconds of a short call
GENERATION_S = (20.0, 90.0)  # of the responses to one prompt
PREPARE_S, UPDATE_S, BUCKET_S = 20.0, 60.0, 0.2
PROMPT_TOKENS, RESPONSE_TOKENS = 200, (50, 8000)
BUCKETS = 16
METRICS = {f"actor/metric_{index}": 0.5 for index in range(20)}
LOGPROBS = [[-1.5] * 23] * 2


class Cluster:
    """Counts what the controller sends: calls and bytes, by kind of actor and method."""

    def __init__(self, seed: int = 0) -> None:
        self.count = 0  # devices, as of a pool
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.outside_s = 0.0
        self.draw = random.Random(seed)
        self.version = -1

    def spawn(self, actor: type, *args: Any, **_: Any) -> FakeActor:
        """Return a new actor, as a pool of devices does."""
        kind = {RolloutActor: "engine", EpisodeWorker: "episode worker"}.get(actor, "train worker")
        self.send(kind, "spawn", args)
        return FakeActor(self, kind)

    def send(self, kind: str, method: str, args: tuple[Any, ...]) -> None:
        self.calls[kind, method] += 1
        self.bytes[kind, method] += len(pickle.dumps(args))

    @contextmanager
    def working_outside(self) -> Iterator[None]:
        """What happens in the block is work of other processes."""
        start = time.thread_time()
        try:
            yield
        finally:
            self.outside_s += time.thread_time() - start

    def take_calls(self, kind: str, method: str) -> float:
        """Return the calls of a method, and no longer count them: not every actor gets them."""
        self.bytes.pop((kind, method), None)
        return float(self.calls.pop((kind, method), 0))

    def per_actor(self, kind: str, actors: int) -> dict[str, float]:
        """Return calls and bytes that were sent to each actor of a kind."""
        calls = sum(count for (of, _), count in self.calls.items() if of == kind)
        sent = sum(count for (of, _), count in self.bytes.items() if of == kind)
        return {"calls": calls / actors, "bytes": sent / actors}


class FakeActor:
    """Looks like a handle of Ray: `actor.method.remote(...)` returns something to await."""

    def __init__(self, cluster: Cluster, kind: str) -> None:
        self._cluster, self._kind, self._version, self._packed = cluster, kind, -1, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (bytes(64),)  # a handle, as others get it

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self, name)

    def _reply(self, method: str, args: tuple[Any, ...]) -> tuple[float, Any]:
        """Return the simulated seconds that a call takes, and its result."""
        if method == "run":
            return self._cluster.draw.uniform(*GENERATION_S), _run_group(self._cluster, args[0])
        if method == "finish_weight_update":
            self._version = self._cluster.version = args[0]
        if method == "pack_bucket":
            self._packed = 1 if args[0] else self._packed + 1
        results: dict[str, tuple[float, Any]] = {
            "address": (CALL_S, ("10.0.0.1", 29500)),
            "start": (CALL_S, []),
            "prepare": (PREPARE_S, {**METRICS, **_phases("prepare")}),
            "update": (
                UPDATE_S,
                {**{name.replace("metric", "update"): value for name, value in METRICS.items()}, **_phases("update")},
            ),
            "pack_bucket": (BUCKET_S, bytes(28) if self._packed <= BUCKETS else None),
            "gather_weights": (BUCKET_S * BUCKETS, _phases("sync")),
            "finish_buckets": (CALL_S, _phases("sync")),
            "load_bucket": (BUCKET_S, None),
            "compute_logprobs": (CALL_S, LOGPROBS),
            "version": (CALL_S, self._version),
        }
        return results.get(method, (CALL_S, True))


def _phases(name: str) -> dict[str, Any]:
    return {PHASES: [["train 0", name, 1_790_000_000.123, 1_790_000_001.123]]}


class _Method:
    def __init__(self, actor: FakeActor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *args: Any) -> _Reply:
        cluster, loop = self._actor._cluster, asyncio.get_running_loop()
        cluster.send(self._actor._kind, self._name, args)
        with cluster.working_outside():
            seconds, result = self._actor._reply(self._name, args)
            data = pickle.dumps(result)
            arrival: asyncio.Future[bytes] = loop.create_future()
            loop.call_later(seconds, _arrive, arrival, data)
        return _Reply(arrival)


class _Reply:
    def __init__(self, arrival: asyncio.Future[bytes]) -> None:
        self._arrival = arrival

    def __await__(self) -> Generator[Any, None, Any]:
        return pickle.loads((yield from self._arrival.__await__()))


def _arrive(arrival: asyncio.Future[bytes], data: bytes) -> None:
    if not arrival.done():
        arrival.set_result(data)


def _run_group(cluster: Cluster, request: GroupRequest) -> list[SampleHandle]:
    draw = cluster.draw
    lengths = [draw.randint(*RESPONSE_TOKENS) for _ in request.seeds]
    return [
        SampleHandle(
            ref=bytes(28),
            group=request.group,
            tokens=PROMPT_TOKENS + length,
            generated=length,
            score=float(draw.random() < 0.5),
            version=cluster.version,
            metrics={"format": 1.0},
            index=index,
            prompt_tokens=PROMPT_TOKENS,
            engines=frozenset({index}),
        )
        for index, length in enumerate(lengths)
    ]
