"""Publishing: every engine moves to version v, and proves it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from verl.errors import WeightSyncError
from verl.weights.probe import Probe, compare

__all__ = ["DeviceTransport", "HostTransport", "Publisher", "Receiver", "Source", "Transport"]


class Source(Protocol):
    """The trained model, seen from here."""

    async def pack_weights(self) -> Sequence[Any]:
        """The weights as parcels (or references to parcels)."""
        ...

    async def send_weights(self, backend: str, receivers: Sequence[Receiver], version: int) -> None:
        """Push the weights from device to device by the engine's own `backend`."""
        ...

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of each sequence's tokens but the first."""
        ...


class Receiver(Protocol):
    """A rollout engine, seen from here."""

    async def load_weights(self, parcels: Sequence[Any], version: int) -> None: ...
    async def score(self, token_ids: Sequence[int]) -> list[float]: ...
    async def version(self) -> int: ...


class Transport(Protocol):
    """One way to carry weights from a source to receivers."""

    async def carry(self, source: Source, receivers: Sequence[Receiver], version: int) -> None: ...


class HostTransport:
    """Through host memory: the source packs once, every receiver loads. Works everywhere, also for late joiners."""

    async def carry(self, source: Source, receivers: Sequence[Receiver], version: int) -> None:
        parcels = await source.pack_weights()
        await asyncio.gather(*(receiver.load_weights(parcels, version) for receiver in receivers))


class DeviceTransport:
    """From device to device by vLLM's own trainer-side engine: "nccl" (other devices) or "ipc" (the same ones)."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    async def carry(self, source: Source, receivers: Sequence[Receiver], version: int) -> None:
        await source.send_weights(self.backend, receivers, version)


class Publisher:
    """Owns the move of all engines to a new version. The controller calls it between updates; nobody else does."""

    def __init__(self, source: Source, receivers: Sequence[Receiver], transport: Transport, probe: Probe) -> None:
        self._source, self._receivers, self._transport, self._probe = source, receivers, transport, probe
        self._before: list[list[float]] | None = None

    async def publish(self, version: int) -> dict[str, float]:
        """Bring every engine to `version`; raises `WeightSyncError` unless each of them proves that it is there."""
        start = time.perf_counter()
        await self._transport.carry(self._source, self._receivers, version)
        carried = time.perf_counter()
        gap = await self._prove(version)
        return {
            "weights/version": version,
            "weights/probe_gap": gap,
            "timing_s/sync": carried - start,
            "timing_s/probe": time.perf_counter() - carried,
        }

    async def _prove(self, version: int) -> float:
        reported, expected, answers = await asyncio.gather(
            asyncio.gather(*(receiver.version() for receiver in self._receivers)),
            self._source.score(self._probe.sequences),
            asyncio.gather(*(self._ask(receiver) for receiver in self._receivers)),
        )
        late = {number: seen for number, seen in enumerate(reported) if seen != version}
        if late:
            raise WeightSyncError(f"rollout engines that did not reach version {version} (engine: its version): {late}")
        gap = compare(self._probe, expected, answers, version=version, before=self._before)
        self._before = expected
        return gap

    async def _ask(self, receiver: Receiver) -> list[list[float]]:
        return [await receiver.score(sequence) for sequence in self._probe.sequences]
