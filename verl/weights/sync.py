"""Weight sync: every engine moves to a new version of the weights, which a probe verifies."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar, cast

from verl.errors import DivergenceError, ProcessLostError, TrainerLostError, WeightSyncError
from verl.weights.probe import Probe, compare_logprobs

T = TypeVar("T")

POLL_S = 1.0


class Source(Protocol):
    """The trained model."""

    def pack_weights(self) -> AsyncGenerator[Any, None]:
        """Yield the weights in buckets, or in references to buckets.

        A bucket exists until the next one is asked for, which is packed in the meantime.
        """
        ...

    async def send_weights(self, backend: str, receivers: Sequence[Receiver], version: int) -> None:
        """Send the weights from device to device by the engine's own `backend`."""
        ...

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probs of each sequence's tokens but the first."""
        ...

    async def measure_rounding(self, sequences: Sequence[Sequence[int]], dtype: str) -> float | None:
        """Return how far rounding to `dtype` moves these log-probs on average; None if that is not known."""
        ...


class Receiver(Protocol):
    """A rollout engine."""

    async def start_weight_update(self) -> None: ...
    async def load_bucket(self, bucket: Any) -> None: ...
    async def finish_weight_update(self, version: int) -> None: ...
    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]: ...
    async def version(self) -> int: ...


class HostTransport:
    """Sends through host memory: the source packs a bucket while every receiver loads the previous one."""

    supports_sync_one = True  # a single receiver, whose process is new, can be reached

    async def send(self, source: Source, receivers: Sequence[Receiver], version: int) -> list[Exception | None]:
        """Return for each receiver how it was lost, or None if it has the weights.

        Any other error of a receiver is a loss, too, if another one has the weights: then the transfer works.
        """
        losses: list[Exception | None] = [None] * len(receivers)

        async def call(index: int, method: str, *args: Any) -> None:
            try:
                await getattr(receivers[index], method)(*args)
            except Exception as error:  # noqa: BLE001 - process boundary; one that leaves may raise anything
                losses[index] = error

        async def call_all(method: str, *args: Any) -> None:
            await asyncio.gather(*(call(index, method, *args) for index, loss in enumerate(losses) if loss is None))

        await call_all("start_weight_update")
        async with aclosing(source.pack_weights()) as buckets:
            async for bucket in buckets:
                await call_all("load_bucket", bucket)
        await call_all("finish_weight_update", version)
        if None in losses:
            losses = [None if error is None else _as_loss(error) for error in losses]
        return losses


class DeviceTransport:
    """Sends from device to device by vLLM's trainer-side engine: "nccl" (other devices) or "ipc" (the same ones).

    All receivers take part in one transfer group, which the first transfer creates. If one is lost, the transfer fails
    for all and the run ends: sending to a subset would leave the others waiting.
    """

    supports_sync_one = False

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._group: list[Receiver] | None = None

    async def send(self, source: Source, receivers: Sequence[Receiver], version: int) -> list[Exception | None]:
        self._group = list(receivers) if self._group is None else self._group
        if list(receivers) != self._group:
            raise TrainerLostError(
                f"{len(receivers)} of {len(self._group)} rollout engines are available for version {version} of the "
                f"weights, but weight_transport={self.backend} needs all of them. Set "
                "actor_rollout_ref.rollout.weight_transport=host to continue without lost engines."
            )
        await source.send_weights(self.backend, receivers, version)
        return [None] * len(receivers)


Transport = HostTransport | DeviceTransport


class Receivers(Protocol):
    """The engines of a run by id. `WeightSync` asks which of them take part in a sync, and reports what it observes."""

    @property
    def shares_devices(self) -> bool:
        """Whether receivers use devices of the source, so that they have to sleep while the source trains."""
        ...

    def active(self) -> Mapping[int, Receiver]:
        """Return the receivers that a sync goes to."""
        ...

    def get(self, engine_id: int) -> Receiver:
        """Return one receiver, whatever its state."""
        ...

    def __len__(self) -> int:
        """Return the number of all receivers, including receivers that are restarting or given up."""
        ...

    def mark_lost(self, engine_id: int, error: ProcessLostError) -> None:
        """Record that a receiver was lost during a sync; it is then restarted and calls `sync_one`."""
        ...

    def mark_synced(self, engine_id: int) -> None:
        """Record that a restarted receiver has the weights, and is about to be probed."""
        ...

    async def mark_ready(self, engine_id: int, version: int) -> None:
        """Enable a receiver whose weights of `version` have been verified."""
        ...

    async def wait_for_stale_exit(self) -> None:
        """Return when no inactive receiver can serve requests any more: its weights would be old."""
        ...

    async def free_devices(self) -> None:
        """Return when no receiver uses its device's memory; none starts until `allow_starts`."""
        ...

    def allow_starts(self) -> None:
        """Let receivers start that have waited since `free_devices`."""
        ...


class WeightSync:
    """Moves engines to new weights. The controller calls `sync` after every update. An engine that joins or has been
    restarted calls `sync_one` at any time, and waits while the trained weights are not those of the last sync."""

    def __init__(self, source: Source, receivers: Receivers, transport: Transport, probe: Probe) -> None:
        self._source, self._receivers, self._transport, self._probe = source, receivers, transport, probe
        self._lock = asyncio.Lock()
        self._is_current = asyncio.Event()  # the trained weights are those of the last sync
        self._version = -1
        self._expected: list[list[float]] | None = None  # the trainer's log-probs of the probe at the last sync
        self.outliers: list[int] = []  # engines with wrong weights or results at the last sync, unlike others
        self._validation: asyncio.Future[Any] | None = None
        self._is_calibrated = False

    def keep_version(self, validation: asyncio.Future[Any]) -> None:
        """Keep the engines awake and at their version until a validation is done, unless all of them are lost."""
        self._validation = validation

    async def _wait_for_validation(self) -> None:
        validation = self._validation
        while validation and not validation.done() and self._receivers.active():  # lost ones return after a sync
            await asyncio.wait([validation], timeout=POLL_S)

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Wrap every change of the trained weights: from here to the next sync, `sync_one` waits."""
        async with self._lock:
            self._is_current.clear()
            yield

    async def free_devices(self) -> None:
        """Give the memory of the engines' devices to the trainer, where they share them, until the next sync."""
        if self._receivers.shares_devices:
            await self._wait_for_validation()
            async with self._lock:
                self._is_current.clear()  # `sync_one` would wake an engine
                await self._receivers.free_devices()

    async def sync(self, version: int) -> dict[str, float]:
        """Bring every engine to `version` and return metrics; `WeightSyncError` if the probe verifies none of them.

        When it returns, no engine serves requests with older or unverified weights. Lost engines are restarted, and so
        are the `outliers`, which the probe does not verify: what they have generated may be wrong, too.
        """
        await self._wait_for_validation()
        async with self._lock:
            self._is_current.clear()
            self.outliers = []
            start = time.perf_counter()
            engine_ids = await self._send(self._receivers.active(), version)
            sent = time.perf_counter()
            gap = await self._verify(engine_ids, version)
            await self._receivers.wait_for_stale_exit()
            self._version = version
            self._receivers.allow_starts()
            self._is_current.set()
            metrics = {
                "weights/version": version,
                "weights/probe_tolerance": self._probe.tolerance,
                "timing_s/sync": sent - start,
                "timing_s/probe": time.perf_counter() - sent,
            }
            return metrics if gap is None else metrics | {"weights/probe_gap": gap}

    async def sync_one(self, engine_id: int) -> None:
        """Bring one engine to the version of the others; raises unless the probe verifies it."""
        while True:
            await self._is_current.wait()
            async with self._lock:
                if self._is_current.is_set():  # an update may have come first
                    return await self._sync_one(engine_id)

    async def _sync_one(self, engine_id: int) -> None:
        if not self._transport.supports_sync_one:
            raise TrainerLostError(
                f"rollout engine {engine_id} was restarted, and device transfers cannot reach a new process. Set "
                "actor_rollout_ref.rollout.weight_transport=host to continue after such a loss."
            )
        receiver = self._receivers.get(engine_id)
        with _losing_trainer():  # the loss of the receiver is returned, not raised
            [loss] = await self._transport.send(self._source, [receiver], self._version)
        if loss is not None:
            raise loss
        self._receivers.mark_synced(engine_id)
        reply = await self._run_probe(engine_id)
        with _losing_trainer():  # it may be asked for the tolerance
            _, mismatches = await self._judge({engine_id: reply}, self._version)
        if mismatches:
            raise WeightSyncError(mismatches[engine_id])
        await self._receivers.mark_ready(engine_id, self._version)

    async def _send(self, receivers: Mapping[int, Receiver], version: int) -> list[int]:
        """Send the weights; return the ids of the receivers that have them."""
        if not receivers:  # all are restarting, and will call `sync_one`
            return []
        losses = await self._transport.send(self._source, list(receivers.values()), version)
        return list(self._drop_lost(list(receivers), losses))

    async def _verify(self, engine_ids: Sequence[int], version: int) -> float | None:
        """Probe and enable the receivers; return the largest gap to the trainer, None without receivers.

        If all engines mismatch, the transfer is broken, and the run ends. Otherwise only the engines that mismatch are
        restarted; they may have returned wrong results before the probe, too.
        """
        expected, outcomes = await asyncio.gather(
            self._source.compute_logprobs(self._probe.sequences),
            asyncio.gather(*(self._run_probe(engine_id) for engine_id in engine_ids), return_exceptions=True),
        )
        _check_finite(expected, version)
        previous, self._expected = self._expected, expected
        if not self._is_calibrated:
            await self._calibrate()
        answers = {
            engine_id: outcome
            for engine_id, outcome in zip(engine_ids, outcomes, strict=True)
            if not isinstance(outcome, BaseException) and outcome[0] == version
        }
        replies = self._drop_lost(engine_ids, outcomes)
        gap, mismatches = await self._judge({**answers, **replies}, version, previous)
        broken = mismatches.keys() & replies.keys()
        if broken and len(broken) == len(self._receivers):
            raise WeightSyncError(next(iter(mismatches.values())))
        self.outliers += mismatches  # also one that was lost after its answer
        for engine_id in broken:
            self._receivers.mark_lost(engine_id, ProcessLostError(mismatches[engine_id]))
        verified = [engine_id for engine_id in replies if engine_id not in mismatches]
        enabling = (self._receivers.mark_ready(engine_id, version) for engine_id in verified)
        self._drop_lost(verified, await asyncio.gather(*enabling, return_exceptions=True))
        return gap if replies else None

    async def _run_probe(self, engine_id: int) -> tuple[int, list[list[float]]]:
        receiver = self._receivers.get(engine_id)
        return await receiver.version(), await receiver.compute_logprobs(self._probe.sequences)

    async def _calibrate(self) -> None:
        """Derive the tolerance of the probe from the current weights."""
        if self._probe.dtype is not None:
            rounding = await self._source.measure_rounding(self._probe.sequences, self._probe.dtype)
            self._probe = self._probe.calibrate(rounding)
        self._is_calibrated = True

    async def _judge(
        self,
        replies: Mapping[int, tuple[int, list[list[float]]]],
        version: int,
        previous: list[list[float]] | None = None,
    ) -> tuple[float, dict[int, str]]:
        """`_compare`, if an engine seems to be wrong with the tolerance of these weights: they may round further."""
        gap, mismatches = self._compare(replies, version, previous)
        if mismatches and self._probe.dtype is not None:
            await self._calibrate()
            gap, mismatches = self._compare(replies, version, previous)
        return gap, mismatches

    def _compare(
        self,
        replies: Mapping[int, tuple[int, list[list[float]]]],
        version: int,
        previous: list[list[float]] | None = None,
    ) -> tuple[float, dict[int, str]]:
        """Return the largest gap of the engines that are verified, and what is wrong with each of the others."""
        assert self._expected is not None
        mismatches = {
            engine_id: f"rollout engine {engine_id} did not reach version {version} of the weights: "
            f"it reports {reported}."
            for engine_id, (reported, _) in replies.items()
            if reported != version
        }
        logprobs = {engine_id: values for engine_id, (_, values) in replies.items() if engine_id not in mismatches}
        gap, others = compare_logprobs(self._probe, self._expected, logprobs, version=version, previous=previous)
        return gap, mismatches | others

    def _drop_lost(self, engine_ids: Sequence[int], outcomes: Sequence[T | BaseException | None]) -> dict[int, T]:
        """Return the outcomes of active receivers: one that was replaced in the meantime does not count."""
        by_id = dict(zip(engine_ids, outcomes, strict=True))
        for engine_id, outcome in by_id.items():
            if isinstance(outcome, ProcessLostError):
                self._receivers.mark_lost(engine_id, outcome)
        active = self._receivers.active()
        kept = {engine_id: outcome for engine_id, outcome in by_id.items() if engine_id in active}
        for outcome in kept.values():
            if isinstance(outcome, BaseException):
                raise outcome
        return cast(dict[int, T], kept)


@contextmanager
def _losing_trainer() -> Iterator[None]:
    """Raise the loss of a process as that of the trainer."""
    try:
        yield
    except ProcessLostError as error:
        raise TrainerLostError(str(error)) from error


def _as_loss(error: Exception) -> ProcessLostError:
    return error if isinstance(error, ProcessLostError) else ProcessLostError(str(error) or repr(error))


def _check_finite(trainer: Sequence[Sequence[float]], version: int) -> None:
    """Raise if the trained model itself is broken: no engine could hold weights that verify."""
    if not all(math.isfinite(value) for sequence in trainer for value in sequence):
        raise DivergenceError(
            f"train worker: actor: training has diverged: log-probs of version {version} are not finite, computed by "
            "the trainer itself. The weight sync is not the cause. Earlier checkpoints are intact. Rerun with a lower "
            "learning rate (actor_rollout_ref.actor.optim.lr) to resume from the last one."
        )
