"""Publishing: every engine moves to version v, and proves it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar, cast

from verl.errors import ProcessLostError, TrainerLostError, WeightSyncError
from verl.weights.probe import Probe, compare

__all__ = [
    "DeviceTransport",
    "HostTransport",
    "Membership",
    "Receiver",
    "Source",
    "StaticMembership",
    "Transport",
    "WeightSync",
]

T = TypeVar("T")


class Source(Protocol):
    """The trained model, seen from here."""

    async def pack_weights(self) -> Sequence[Any]:
        """The weights as parcels (or references to parcels)."""
        ...

    async def send_weights(self, backend: str, receivers: Sequence[Receiver], version: int) -> None:
        """Push the weights from device to device by the engine's own `backend`."""
        ...

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of each sequence's tokens but the first."""
        ...


class Receiver(Protocol):
    """A rollout engine, seen from here."""

    async def load_weights(self, buckets: Sequence[Any], version: int) -> None: ...
    async def compute_logprobs(self, token_ids: Sequence[int]) -> list[float]: ...
    async def version(self) -> int: ...


class Transport(Protocol):
    """One way to carry weights from a source to receivers."""

    supports_sync_one: bool
    """Whether one receiver whose process is a new one can be reached, alone."""

    async def send(self, source: Source, receivers: Sequence[Receiver], version: int) -> list[ProcessLostError | None]:
        """For each receiver how it was lost on the way, or None: it has the weights."""
        ...


class HostTransport:
    """Through host memory: the source packs once, every receiver loads. Works everywhere, also for late joiners."""

    supports_sync_one = True

    async def send(self, source: Source, receivers: Sequence[Receiver], version: int) -> list[ProcessLostError | None]:
        buckets = await source.pack_weights()
        loads = (receiver.load_weights(buckets, version) for receiver in receivers)
        return [_loss(outcome) for outcome in await asyncio.gather(*loads, return_exceptions=True)]


class DeviceTransport:
    """From device to device by vLLM's own trainer-side engine: "nccl" (other devices) or "ipc" (the same ones).

    All receivers take part in one transfer, whose group is made by the first: with one of them lost it fails for all,
    and for the run. Nothing is sent to a part of them: those left out, or there anew, would keep the others waiting.
    """

    supports_sync_one = False

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._first: list[Receiver] | None = None

    async def send(self, source: Source, receivers: Sequence[Receiver], version: int) -> list[ProcessLostError | None]:
        self._first = list(receivers) if self._first is None else self._first
        if list(receivers) != self._first:
            raise TrainerLostError(
                f"{len(receivers)} of {len(self._first)} rollout engines are there to take the weights of version "
                f"{version}: weight_transport={self.backend} serves all of the first transfer or none; with "
                "actor_rollout_ref.rollout.weight_transport=host a run goes on without one that is lost"
            )
        await source.send_weights(self.backend, receivers, version)
        return [None] * len(receivers)


class Membership(Protocol):
    """Who of the receivers takes part, by their numbers: the publisher asks, and tells what it finds."""

    def active(self) -> Sequence[int]:
        """Those that a publish goes to."""
        ...

    def mark_lost(self, index: int, error: ProcessLostError) -> None:
        """One of them was lost on the way; it is somebody else's task to bring it back and let it join."""
        ...

    def mark_synced(self, index: int) -> None:
        """One that joins has got the weights, and is about to be probed."""
        ...

    async def mark_ready(self, index: int, version: int) -> None:
        """One holds the weights of `version`, and may answer."""
        ...

    async def wait_for_stale_exit(self) -> None:
        """Returns when none that is not present can answer anybody: it would do so with old weights."""
        ...


class StaticMembership:
    """A crew of which nobody may be lost."""

    def __init__(self, count: int) -> None:
        self._count = count

    def active(self) -> Sequence[int]:
        return range(self._count)

    def mark_lost(self, index: int, error: ProcessLostError) -> None:
        raise error

    def mark_synced(self, index: int) -> None: ...
    async def mark_ready(self, index: int, version: int) -> None: ...
    async def wait_for_stale_exit(self) -> None: ...


class WeightSync:
    """Owns the move of the engines to a new version. The controller publishes between updates; who was lost may join
    at any time, and waits while the trained weights are not those of the last publish."""

    def __init__(
        self,
        source: Source,
        receivers: Sequence[Receiver],
        transport: Transport,
        probe: Probe,
        membership: Membership | None = None,
    ) -> None:
        self._source, self._receivers, self._transport, self._probe = source, receivers, transport, probe
        self._membership = StaticMembership(len(receivers)) if membership is None else membership
        self._turn = asyncio.Lock()
        self._is_settled = asyncio.Event()  # the trained weights are those of the last publish
        self._version = -1
        self._expected: list[list[float]] | None = None  # the trainer's log-probs of the probe at the last publish

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Around whatever changes the trained weights: from here to the next publish no engine joins."""
        async with self._turn:
            self._is_settled.clear()
            yield

    async def sync(self, version: int) -> dict[str, float]:
        """Bring every engine to `version`; raises `WeightSyncError` unless each of them proves that it is there.

        When it returns, no engine answers with older weights. One that is lost on the way is left to the crew.
        """
        async with self._turn:
            self._is_settled.clear()
            start = time.perf_counter()
            indices = await self._send(self._membership.active(), version)
            sent = time.perf_counter()
            gap = await self._prove(indices, version)
            await self._membership.wait_for_stale_exit()
            self._version = version
            self._is_settled.set()
            metrics = {
                "weights/version": version,
                "timing_s/sync": sent - start,
                "timing_s/probe": time.perf_counter() - sent,
            }
            return metrics if gap is None else metrics | {"weights/probe_gap": gap}

    async def sync_one(self, index: int) -> None:
        """Bring one engine to the version of the others; raises unless it proves that it is there."""
        while True:
            await self._is_settled.wait()
            async with self._turn:
                if self._is_settled.is_set():  # an update may have had its turn first
                    return await self._sync_one(index)

    async def _sync_one(self, index: int) -> None:
        if not self._transport.supports_sync_one:
            raise TrainerLostError(
                f"rollout engine {index} was lost and is back, and device transfers cannot reach a new process; with "
                "actor_rollout_ref.rollout.weight_transport=host it would go on where the others are"
            )
        try:
            [loss] = await self._transport.send(self._source, [self._receivers[index]], self._version)
        except ProcessLostError as error:  # what the receiver has lost is returned
            raise TrainerLostError(str(error)) from error
        if loss is not None:
            raise loss
        self._membership.mark_synced(index)
        self._compare({index: await self._ask(index)}, self._version)
        await self._membership.mark_ready(index, self._version)

    async def _send(self, indices: Sequence[int], version: int) -> list[int]:
        """Who has got the weights."""
        if not indices:  # all are away; who comes back joins
            return []
        receivers = [self._receivers[index] for index in indices]
        return list(self._outcomes(indices, await self._transport.send(self._source, receivers, version)))

    async def _prove(self, indices: Sequence[int], version: int) -> float | None:
        """The largest gap between trainer and engines; None if all of them are away: who comes back proves itself."""
        expected, outcomes = await asyncio.gather(
            self._source.compute_logprobs(self._probe.sequences),
            asyncio.gather(*(self._ask(index) for index in indices), return_exceptions=True),
        )
        before, self._expected = self._expected, expected
        answers = self._outcomes(indices, outcomes)
        gap = self._compare(answers, version, before)
        proofs = (self._membership.mark_ready(index, version) for index in answers)
        self._outcomes(list(answers), await asyncio.gather(*proofs, return_exceptions=True))
        return gap if answers else None

    async def _ask(self, index: int) -> tuple[int, list[list[float]]]:
        receiver = self._receivers[index]
        return await receiver.version(), [
            await receiver.compute_logprobs(sequence) for sequence in self._probe.sequences
        ]

    def _compare(
        self,
        answers: Mapping[int, tuple[int, list[list[float]]]],
        version: int,
        before: list[list[float]] | None = None,
    ) -> float:
        late = {index: seen for index, (seen, _) in answers.items() if seen != version}
        if late:
            raise WeightSyncError(f"rollout engines that did not reach version {version} (engine: its version): {late}")
        assert self._expected is not None
        logprobs = {index: found for index, (_, found) in answers.items()}
        return compare(self._probe, self._expected, logprobs, version=version, before=before)

    def _outcomes(self, indices: Sequence[int], outcomes: Sequence[T | BaseException | None]) -> dict[int, T]:
        """What those gave who are still there: of one that was replaced in the meantime nothing counts."""
        for index, outcome in zip(indices, outcomes, strict=True):
            if isinstance(outcome, ProcessLostError):
                self._membership.mark_lost(index, outcome)
        active = self._membership.active()
        found = {index: outcome for index, outcome in zip(indices, outcomes, strict=True) if index in active}
        for outcome in found.values():
            if isinstance(outcome, BaseException):
                raise outcome
        return cast(dict[int, T], found)


def _loss(outcome: BaseException | None) -> ProcessLostError | None:
    if outcome is not None and not isinstance(outcome, ProcessLostError):
        raise outcome
    return outcome
