"""The keeper of the rollout engines: it notices that one is lost, brings it back, and gives up on one that does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from verl.errors import EngineError, ProcessLostError, TrainerLostError

__all__ = ["EngineEvent", "EngineState", "EngineSupervisor", "SupervisedEngine", "within"]

T = TypeVar("T")
_log = logging.getLogger(__name__)

MOST_BACKOFF_S = 60.0


class EngineState(Enum):
    """Where an engine is on its way. Only those that are ready answer requests."""

    STARTING = "starting"  # it is up, and no weights have come yet
    READY = "ready"
    LOST = "lost"
    RESTARTING = "restarting"
    SYNCING = "syncing"  # the weights are on their way to it
    PROBING = "probing"
    GIVEN_UP = "given up"


_MOVES = {
    EngineState.STARTING: {EngineState.READY, EngineState.LOST},
    EngineState.READY: {EngineState.LOST},
    EngineState.LOST: {EngineState.RESTARTING, EngineState.GIVEN_UP},
    EngineState.RESTARTING: {EngineState.SYNCING, EngineState.LOST},
    EngineState.SYNCING: {EngineState.PROBING, EngineState.LOST},
    EngineState.PROBING: {EngineState.READY, EngineState.LOST},
    EngineState.GIVEN_UP: set(),
}
_ACTIVE = (EngineState.STARTING, EngineState.READY)


class SupervisedEngine(Protocol):
    """A rollout engine as its keeper needs it: the handle stays, the process behind it may be replaced.

    A process is born shut: it answers `generate` and `generate_all` with `ProcessLostError` until it has been opened.
    Before it has started, all its other methods do so too, but for `ready`.
    """

    async def is_ready(self) -> bool:
        """Whether it is open and could generate; the heartbeat. `ProcessLostError` while there is no process."""
        ...

    async def enable(self, version: int) -> None:
        """Answer requests from now on; `ProcessLostError` unless it holds `version`, as a new process would not."""
        ...

    async def end(self) -> None:
        """End the process, whatever state it is in; returns once it can answer nobody any more."""
        ...

    async def start(self) -> None:
        """A new process where the old one was, shut; returns when it could generate."""
        ...


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """An engine has moved from one state to the next. `seconds`: since it was lost, 0 for one that was not."""

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
    """One engine and what is known of it."""

    index: int
    engine: SupervisedEngine
    state: EngineState = EngineState.STARTING
    reason: str = ""  # it was lost the last time
    lost_at: float = 0.0
    told: asyncio.Event = field(default_factory=asyncio.Event)  # of its loss
    silent: asyncio.Event = field(default_factory=asyncio.Event)  # no process of it is open

    def __post_init__(self) -> None:
        self.silent.set()


class EngineSupervisor:
    """Restarts rollout engines that fail. One per run, in the controller; it is the `Membership` of the weight sync.

    Every `heartbeat_s` it asks each engine whether it is ready, and treats it as lost if there is no reply within
    `reply_timeout_s`; the weight sync reports losses, too. A lost engine is stopped and started again (each within
    `start_timeout_s`), synced to the current weights and enabled. After `max_restarts` failures in a row it is given
    up and the run continues with the others; with none left, `run_while_available` and `active` raise. Every change
    of state is reported.
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
    ) -> None:
        self._slots = [EngineSlot(index, engine) for index, engine in enumerate(engines)]
        self._report = report
        self._heartbeat_s, self._reply_timeout_s, self._start_timeout_s = heartbeat_s, reply_timeout_s, start_timeout_s
        self._max_restarts, self._backoff_s = max_restarts, backoff_s
        self._keeping: list[asyncio.Task[None]] = []
        self._none_left = asyncio.Event()
        self._crash: BaseException | None = None

    def start(self, sync_one: Callable[[int], Awaitable[None]]) -> None:
        """Start watching engines that are up; `sync_one` brings one of them to the current weights."""
        self._keeping = [asyncio.ensure_future(self._keep(slot, sync_one)) for slot in self._slots]
        for task in self._keeping:
            task.add_done_callback(self._check_end)

    async def close(self) -> None:
        """Watch no more; to be done before the engines are closed, or they would be restarted."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)

    async def run_while_available(self, work: Awaitable[T]) -> T:
        """What `work` gives; an error as soon as no engine is left that it could wait for."""
        working, none_left = asyncio.ensure_future(work), asyncio.ensure_future(self._none_left.wait())
        try:
            await asyncio.wait([working, none_left], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise self._obituary()
            return working.result()
        finally:
            working.cancel()
            none_left.cancel()

    @property
    def states(self) -> tuple[EngineState, ...]:
        return tuple(slot.state for slot in self._slots)

    def active(self) -> list[int]:
        if self._none_left.is_set():
            raise self._obituary()
        return [slot.index for slot in self._slots if slot.state in _ACTIVE]

    def mark_lost(self, index: int, error: ProcessLostError) -> None:
        slot = self._slots[index]
        if slot.state in _ACTIVE:  # else it is known; and what is there now is another process
            self._lose(slot, str(error))

    def mark_synced(self, index: int) -> None:
        self._move(self._slots[index], EngineState.PROBING)

    async def mark_ready(self, index: int, version: int) -> None:
        slot = self._slots[index]
        if (state := slot.state) not in (EngineState.STARTING, EngineState.PROBING):
            return
        slot.silent.clear()
        await slot.engine.enable(version)
        if slot.state is state:  # it may have been lost in the meantime
            self._move(slot, EngineState.READY)

    async def wait_for_stale_exit(self) -> None:
        for slot in self._slots:
            if slot.state not in _ACTIVE:
                await slot.silent.wait()

    async def _keep(self, slot: EngineSlot, sync_one: Callable[[int], Awaitable[None]]) -> None:
        while slot.state is not EngineState.GIVEN_UP:
            await self._while_it_beats(slot, _for_ever())
            await self._recover(slot, sync_one)

    async def _recover(self, slot: EngineSlot, sync_one: Callable[[int], Awaitable[None]]) -> None:
        for attempt in range(self._max_restarts):
            if attempt:
                await asyncio.sleep(min(self._backoff_s * 2 ** (attempt - 1), MOST_BACKOFF_S))
            try:
                await self._restart(slot)
                self._move(slot, EngineState.SYNCING)
                await self._while_it_beats(slot, sync_one(slot.index))
            except TrainerLostError:  # the run's loss, not the engine's: `run_while_available` raises it
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of a process: whatever it is, it is tried again
                _log.debug("rollout engine %d did not come back", slot.index, exc_info=True)
                self._lose(slot, _words(error))
            if slot.state is EngineState.READY:
                return
        self._move(
            slot, EngineState.GIVEN_UP, f"{self._max_restarts} restarts in a row failed, the last one: {slot.reason}"
        )
        slot.silent.set()
        if all(other.state is EngineState.GIVEN_UP for other in self._slots):
            self._none_left.set()

    async def _restart(self, slot: EngineSlot) -> None:
        self._move(slot, EngineState.RESTARTING, slot.reason)
        slot.told.clear()
        await within(slot.engine.end(), self._start_timeout_s)  # the process that replaces it must come up, too
        slot.silent.set()
        await within(slot.engine.start(), self._start_timeout_s)

    async def _while_it_beats(self, slot: EngineSlot, work: Awaitable[None]) -> None:
        """Do `work` until it is done or the engine is lost; which of the two, its state tells."""
        tasks = [asyncio.ensure_future(part) for part in (work, self._beats(slot), slot.told.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _beats(self, slot: EngineSlot) -> None:
        while True:
            should_be_ready = slot.state is EngineState.READY
            try:
                is_ready = await within(slot.engine.is_ready(), self._reply_timeout_s)
            except Exception as error:  # noqa: BLE001 - the boundary of a process
                return self._lose(slot, _words(error))
            if should_be_ready and not is_ready:
                return self._lose(slot, "its process was replaced, or somebody who waited for it in vain shut it")
            await asyncio.sleep(self._heartbeat_s)

    def _lose(self, slot: EngineSlot, reason: str) -> None:
        if slot.state is EngineState.LOST:
            return
        if slot.state in _ACTIVE:
            slot.lost_at = asyncio.get_running_loop().time()
        slot.reason = reason
        self._move(slot, EngineState.LOST, reason)
        slot.told.set()

    def _move(self, slot: EngineSlot, state: EngineState, reason: str = "") -> None:
        before = slot.state
        if state not in _MOVES[before]:
            raise RuntimeError(f"rollout engine {slot.index} cannot go from {before.value} to {state.value}")
        slot.state = state
        was_lost = before not in _ACTIVE
        seconds = asyncio.get_running_loop().time() - slot.lost_at if was_lost else 0.0
        self._report(EngineEvent(slot.index, before, state, reason, seconds))

    def _check_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:  # a mistake of ours, or of who is told of the events
            self._crash = task.exception()
            self._none_left.set()

    def _obituary(self) -> BaseException:
        if self._crash is not None:
            return self._crash
        ends = "; ".join(f"engine {slot.index}: {slot.reason}" for slot in self._slots)
        return EngineError(
            f"no rollout engine is left: each was restarted {self._max_restarts} times in vain. {ends}. Mend what "
            "ended them and start the run again: it goes on from its last checkpoint (trainer.resume_mode=auto)"
        )


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


def _words(error: BaseException) -> str:
    return str(error) or repr(error)


async def within(work: Awaitable[T], seconds: float) -> T:
    """What `work` gives, or a `TimeoutError` with words. Unlike `asyncio.wait_for` before Python 3.12, it never takes a
    cancellation that comes together with the result for none: a task that asks for ever could then not be ended."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait([working], timeout=seconds)
        if not working.done():
            raise asyncio.TimeoutError(f"no answer within {seconds:.0f} s")
        return working.result()
    finally:
        working.cancel()
