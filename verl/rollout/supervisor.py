"""Detects failed rollout engines, restarts them, and gives up on those that keep failing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from verl.errors import EngineError, ProcessLostError, TrainerLostError
from verl.waiting import Waits, with_timeout

T = TypeVar("T")
_log = logging.getLogger(__name__)

MAX_BACKOFF_S = 60.0
MAX_HEARTBEATS_PER_S = 10.0  # of all engines: hundreds would keep the controller busy


class EngineState(Enum):
    """The lifecycle of an engine. Only ready engines accept requests."""

    STARTING = "starting"  # up, before its first weights
    READY = "ready"
    LOST = "lost"
    RESTARTING = "restarting"
    SYNCING = "syncing"
    PROBING = "probing"
    GIVEN_UP = "given up"


_TRANSITIONS = {
    EngineState.STARTING: {EngineState.READY, EngineState.LOST},
    EngineState.READY: {EngineState.LOST},
    EngineState.LOST: {EngineState.RESTARTING, EngineState.GIVEN_UP},
    EngineState.RESTARTING: {EngineState.SYNCING, EngineState.LOST},
    EngineState.SYNCING: {EngineState.PROBING, EngineState.LOST},
    EngineState.PROBING: {EngineState.READY, EngineState.LOST},
    EngineState.GIVEN_UP: set(),
}
_ACTIVE = (EngineState.STARTING, EngineState.READY)
_STARTED = (*_ACTIVE, EngineState.SYNCING, EngineState.PROBING)


class SupervisedEngine(Protocol):
    """A rollout engine as its supervisor sees it: the handle stays, the process behind it may be replaced.

    Engines start disabled and reject requests (`generate`, `generate_all`) with `ProcessLostError` until their weights
    have been verified. Before the engine has started, all methods but `is_ready` do so.
    """

    async def is_ready(self) -> bool:
        """Return whether it is enabled and can generate; the heartbeat. `ProcessLostError` without a process."""
        ...

    async def enable(self, version: int) -> None:
        """Accept requests from now on; `ProcessLostError` unless it holds `version`, which a new process does not."""
        ...

    async def sleep(self) -> None:
        """Free the device's memory until weights are loaded; `is_ready` does not change."""
        ...

    async def end(self) -> None:
        """End the process, whatever its state; returns once it can no longer reply to anyone."""
        ...

    async def start(self) -> None:
        """Start a new, disabled process in place of the old one; returns when it can generate."""
        ...


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """A change of an engine's state. `seconds` since it was lost; 0 if it was not."""

    index: int
    previous: EngineState
    state: EngineState
    reason: str
    seconds: float

    def __str__(self) -> str:
        after = f" after {self.seconds:.0f} s" if self.seconds else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"rollout engine {self.index} is {self.state.value}{after} (was {self.previous.value}){reason}"


@dataclass(eq=False)
class EngineSlot:
    """One engine and its state."""

    index: int
    engine: SupervisedEngine
    state: EngineState = EngineState.STARTING
    reason: str = ""  # of the last loss
    lost_at: float = 0.0
    was_lost: asyncio.Event = field(default_factory=asyncio.Event)
    is_silent: asyncio.Event = field(default_factory=asyncio.Event)  # none of its processes is enabled
    has_settled: asyncio.Event = field(default_factory=asyncio.Event)  # none of its processes is starting
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)  # none of its processes uses the device

    def __post_init__(self) -> None:
        self.is_silent.set()
        self.has_settled.set()


class EngineSupervisor:
    """Restarts rollout engines that fail. One per run, in the controller; it is the `Membership` of the weight sync.

    Every `heartbeat_s` (with hundreds of engines less often) it asks each engine whether it is ready, and treats it as
    lost if there is no reply within `reply_timeout_s`; the weight sync reports losses, too. A lost engine is ended and
    started again (each within `start_timeout_s`), synced to the current weights and enabled. After `max_restarts`
    failures in a row it is given up and the run continues with the others; with none left, `run_while_available` and
    `active` raise. Every change of state is reported. With `shares_devices`, engines sleep and none starts between
    `free_devices` and `allow_starts`.
    """

    def __init__(
        self,
        engines: Sequence[SupervisedEngine],
        report: Callable[[EngineEvent], None],
        *,
        heartbeat_s: float = 10.0,
        reply_timeout_s: float = 60.0,
        start_timeout_s: float = 1200.0,
        max_restarts: int = 5,
        backoff_s: float = 1.0,
        shares_devices: bool = False,
    ) -> None:
        self._slots = [EngineSlot(index, engine) for index, engine in enumerate(engines)]
        self._report = report
        self._heartbeat_s, self._reply_timeout_s = heartbeat_s, reply_timeout_s
        self._start_timeout_s = start_timeout_s
        self._max_restarts, self._backoff_s = max_restarts, backoff_s
        self.shares_devices = shares_devices
        self._tasks: list[asyncio.Task[None]] = []
        self._has_failed = False
        self._waits = Waits()  # those of `run_while_available`
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._crash: BaseException | None = None

    def start(self, sync_one: Callable[[int], Awaitable[None]]) -> None:
        """Start supervising engines that are up; `sync_one` brings one of them to the current weights."""
        self._tasks = [asyncio.ensure_future(self._supervise(slot, sync_one)) for slot in self._slots]
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)

    async def close(self) -> None:
        """Stop supervising. Call it before closing the engines, or they would be restarted."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def run_while_available(self, work: Awaitable[T]) -> T:
        """Return the result of `work`; raise as soon as no engine is left that it could wait for."""
        if self._has_failed:
            asyncio.get_running_loop().call_soon(self._waits.interrupt, self._failure())
        return await self._waits.wait(work)

    @property
    def states(self) -> tuple[EngineState, ...]:
        return tuple(slot.state for slot in self._slots)

    def active(self) -> list[int]:
        if self._has_failed:
            raise self._failure()
        return [slot.index for slot in self._slots if slot.state in _ACTIVE]

    def mark_lost(self, index: int, error: ProcessLostError) -> None:
        slot = self._slots[index]
        if slot.state in _ACTIVE:  # else it is known, and its process is another one by now
            self._set_lost(slot, str(error))

    def mark_synced(self, index: int) -> None:
        self._set_state(self._slots[index], EngineState.PROBING)

    async def mark_ready(self, index: int, version: int) -> None:
        slot = self._slots[index]
        if (state := slot.state) not in (EngineState.STARTING, EngineState.PROBING):
            return
        slot.is_silent.clear()
        await slot.engine.enable(version)
        if slot.state is state:  # it may have been lost in the meantime
            self._set_state(slot, EngineState.READY)

    async def free_devices(self) -> None:
        self._may_start.clear()
        await asyncio.gather(*(slot.has_settled.wait() for slot in self._slots))
        asleep = await asyncio.gather(*(self._put_to_sleep(slot) for slot in self._slots))
        for slot, is_asleep in zip(self._slots, asleep, strict=True):
            if not is_asleep:
                await self.run_while_available(slot.has_ended.wait())

    def allow_starts(self) -> None:
        self._may_start.set()

    async def _put_to_sleep(self, slot: EngineSlot) -> bool:
        """Return whether it sleeps; if not, it is lost."""
        if slot.state not in _STARTED:
            return False
        try:
            await with_timeout(slot.engine.sleep(), self._start_timeout_s)
            return True
        except Exception as error:  # noqa: BLE001 - process boundary
            if slot.state in _STARTED:  # else its loss is known already
                self._set_lost(slot, str(error) or repr(error))
            return False

    async def wait_for_stale_exit(self) -> None:
        for slot in self._slots:
            if slot.state not in _ACTIVE:
                await self.run_while_available(slot.is_silent.wait())

    async def _supervise(self, slot: EngineSlot, sync_one: Callable[[int], Awaitable[None]]) -> None:
        while slot.state is not EngineState.GIVEN_UP:
            await self._run_until_lost(slot, asyncio.get_running_loop().create_future())
            await self._recover(slot, sync_one)

    async def _recover(self, slot: EngineSlot, sync_one: Callable[[int], Awaitable[None]]) -> None:
        for attempt in range(self._max_restarts):
            if attempt:
                await asyncio.sleep(min(self._backoff_s * 2 ** (attempt - 1), MAX_BACKOFF_S))
            try:
                await self._restart(slot)
                self._set_state(slot, EngineState.SYNCING)
                await self._run_until_lost(slot, sync_one(slot.index))
            except TrainerLostError:  # ends the run, not the engine: `run_while_available` raises it
                raise
            except Exception as error:  # noqa: BLE001 - process boundary: any failure is retried
                _log.debug("rollout engine %d did not restart", slot.index, exc_info=True)
                self._set_lost(slot, str(error) or repr(error))
            if slot.state is EngineState.READY:
                return
        reason = f"{self._max_restarts} restarts in a row failed, the last one: {slot.reason}"
        self._set_state(slot, EngineState.GIVEN_UP, reason)
        with contextlib.suppress(Exception):  # process boundary
            await self._end(slot)
        must_end = slot.has_ended if self.shares_devices else slot.is_silent
        if not must_end.is_set():  # such as on a machine that others still reach
            raise ProcessLostError(
                f"rollout engine {slot.index} could not be ended, and may still serve old weights or use its device: "
                f"{reason}"
            )
        if all(other.state is EngineState.GIVEN_UP for other in self._slots):
            self._fail()

    async def _restart(self, slot: EngineSlot) -> None:
        self._set_state(slot, EngineState.RESTARTING, slot.reason)
        slot.was_lost.clear()
        await self._end(slot)
        while not self._may_start.is_set():
            await self._may_start.wait()
        slot.has_settled.clear()
        slot.has_ended.clear()
        try:
            await with_timeout(slot.engine.start(), self._start_timeout_s)
        finally:
            slot.has_settled.set()

    async def _end(self, slot: EngineSlot) -> None:
        await with_timeout(slot.engine.end(), self._start_timeout_s)  # the replacing process must come up, too
        slot.is_silent.set()
        slot.has_ended.set()

    async def _run_until_lost(self, slot: EngineSlot, work: Awaitable[None]) -> None:
        """Run `work` until it is done or the engine is lost; the slot's state shows which."""
        tasks = [asyncio.ensure_future(part) for part in (work, self._send_heartbeats(slot), slot.was_lost.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_heartbeats(self, slot: EngineSlot) -> None:
        interval_s = max(self._heartbeat_s, len(self._slots) / MAX_HEARTBEATS_PER_S)
        while True:
            should_be_ready = slot.state is EngineState.READY
            try:
                is_ready = await with_timeout(slot.engine.is_ready(), self._reply_timeout_s)
            except Exception as error:  # noqa: BLE001 - process boundary
                return self._set_lost(slot, str(error) or repr(error))
            if should_be_ready and not is_ready:
                return self._set_lost(slot, "its process was replaced, or it was disabled after a request timed out")
            await asyncio.sleep(interval_s)

    def _set_lost(self, slot: EngineSlot, reason: str) -> None:
        if slot.state is EngineState.LOST:
            return
        if slot.state in _ACTIVE:
            slot.lost_at = asyncio.get_running_loop().time()
        slot.reason = reason
        self._set_state(slot, EngineState.LOST, reason)
        slot.was_lost.set()

    def _set_state(self, slot: EngineSlot, state: EngineState, reason: str = "") -> None:
        previous = slot.state
        if state not in _TRANSITIONS[previous]:
            raise RuntimeError(f"rollout engine {slot.index} cannot go from {previous.value} to {state.value}")
        slot.state = state
        seconds = 0.0 if previous in _ACTIVE else asyncio.get_running_loop().time() - slot.lost_at
        self._report(EngineEvent(slot.index, previous, state, reason, seconds))

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:  # a bug, an error of `report`, or the trainer is lost
            self._crash = task.exception()
            self._fail()

    def _fail(self) -> None:
        self._has_failed = True
        self._waits.interrupt(self._failure())

    def _failure(self) -> BaseException:
        if self._crash is not None:
            return self._crash
        causes = "; ".join(f"engine {slot.index}: {slot.reason}" for slot in self._slots)
        return EngineError(
            f"All rollout engines failed after {self._max_restarts} restarts each. {causes}. Fix the cause and rerun: "
            "the run resumes from its last checkpoint (trainer.resume_mode=auto)."
        )
