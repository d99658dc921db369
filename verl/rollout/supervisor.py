"""The keeper of the rollout engines: it notices that one is lost, brings it back, and gives up on one that does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from verl.errors import EngineError, ProcessLostError, TrainerLostError

__all__ = ["EngineEvent", "EngineState", "EngineSupervisor", "KeptEngine", "within"]

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
_PRESENT = (EngineState.STARTING, EngineState.READY)


class KeptEngine(Protocol):
    """A rollout engine as its keeper needs it: the handle stays, the process behind it may be replaced.

    A process is born shut: it answers `generate` and `generate_all` with `ProcessLostError` until it has been opened.
    Before it has started, all its other methods do so too, but for `ready`.
    """

    async def ready(self) -> bool:
        """Whether it is open and could generate; the heartbeat. `ProcessLostError` while there is no process."""
        ...

    async def open(self, version: int) -> None:
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

    number: int
    before: EngineState
    now: EngineState
    why: str
    seconds: float

    def __str__(self) -> str:
        after = f" after {self.seconds:.0f} s" if self.seconds else ""
        why = f": {self.why}" if self.why else ""
        return f"rollout engine {self.number} is {self.now.value}{after} (was {self.before.value}){why}"


@dataclass(eq=False)
class _Seat:
    """One engine and what is known of it."""

    number: int
    engine: KeptEngine
    state: EngineState = EngineState.STARTING
    why: str = ""  # it was lost the last time
    lost_at: float = 0.0
    told: asyncio.Event = field(default_factory=asyncio.Event)  # of its loss
    silent: asyncio.Event = field(default_factory=asyncio.Event)  # no process of it is open

    def __post_init__(self) -> None:
        self.silent.set()


class EngineSupervisor:
    """One for all engines, in the controller. It is the publisher's `Crew`, and owns who is ready.

    It asks every engine each `beat_s` whether it is ready, and takes for lost what has not answered after `answer_s`;
    the publisher tells it of losses, too. What is lost is ended and started again, within `start_s` each, joined to the
    current weights by the publisher, and opened. If that fails `max_restarts` times in a row it is given up, and the
    run goes on with the others; with none left, `guard` and `present` raise. Every move is reported.
    """

    def __init__(
        self,
        engines: Sequence[KeptEngine],
        report: Callable[[EngineEvent], None],
        *,
        beat_s: float = 10.0,
        answer_s: float = 60.0,
        start_s: float = 1200.0,
        max_restarts: int = 5,
        backoff_s: float = 1.0,
    ) -> None:
        self._seats = [_Seat(number, engine) for number, engine in enumerate(engines)]
        self._report = report
        self._beat_s, self._answer_s, self._start_s = beat_s, answer_s, start_s
        self._max_restarts, self._backoff_s = max_restarts, backoff_s
        self._keeping: list[asyncio.Task[None]] = []
        self._none_left = asyncio.Event()
        self._crash: BaseException | None = None

    def start(self, join: Callable[[int], Awaitable[None]]) -> None:
        """Watch over engines that are up; `join` is the publisher's, and brings one of them to the current weights."""
        self._keeping = [asyncio.ensure_future(self._keep(seat, join)) for seat in self._seats]
        for task in self._keeping:
            task.add_done_callback(self._check_end)

    async def close(self) -> None:
        """Watch no more; to be done before the engines are closed, or they would be restarted."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)

    async def guard(self, work: Awaitable[T]) -> T:
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
        return tuple(seat.state for seat in self._seats)

    def present(self) -> list[int]:
        if self._none_left.is_set():
            raise self._obituary()
        return [seat.number for seat in self._seats if seat.state in _PRESENT]

    def lost(self, number: int, error: ProcessLostError) -> None:
        seat = self._seats[number]
        if seat.state in _PRESENT:  # else it is known; and what is there now is another process
            self._lose(seat, str(error))

    def carried(self, number: int) -> None:
        self._move(self._seats[number], EngineState.PROBING)

    async def proved(self, number: int, version: int) -> None:
        seat = self._seats[number]
        if (state := seat.state) not in (EngineState.STARTING, EngineState.PROBING):
            return
        seat.silent.clear()
        await seat.engine.open(version)
        if seat.state is state:  # it may have been lost in the meantime
            self._move(seat, EngineState.READY)

    async def silenced(self) -> None:
        for seat in self._seats:
            if seat.state not in _PRESENT:
                await seat.silent.wait()

    async def _keep(self, seat: _Seat, join: Callable[[int], Awaitable[None]]) -> None:
        while seat.state is not EngineState.GIVEN_UP:
            await self._while_it_beats(seat, _for_ever())
            await self._recover(seat, join)

    async def _recover(self, seat: _Seat, join: Callable[[int], Awaitable[None]]) -> None:
        for attempt in range(self._max_restarts):
            if attempt:
                await asyncio.sleep(min(self._backoff_s * 2 ** (attempt - 1), MOST_BACKOFF_S))
            try:
                await self._restart(seat)
                self._move(seat, EngineState.SYNCING)
                await self._while_it_beats(seat, join(seat.number))
            except TrainerLostError:  # the run's loss, not the engine's: `guard` raises it
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of a process: whatever it is, it is tried again
                _log.debug("rollout engine %d did not come back", seat.number, exc_info=True)
                self._lose(seat, _words(error))
            if seat.state is EngineState.READY:
                return
        self._move(
            seat, EngineState.GIVEN_UP, f"{self._max_restarts} restarts in a row failed, the last one: {seat.why}"
        )
        seat.silent.set()
        if all(other.state is EngineState.GIVEN_UP for other in self._seats):
            self._none_left.set()

    async def _restart(self, seat: _Seat) -> None:
        self._move(seat, EngineState.RESTARTING, seat.why)
        seat.told.clear()
        await within(seat.engine.end(), self._start_s)  # the process that replaces it must come up, too
        seat.silent.set()
        await within(seat.engine.start(), self._start_s)

    async def _while_it_beats(self, seat: _Seat, work: Awaitable[None]) -> None:
        """Do `work` until it is done or the engine is lost; which of the two, its state tells."""
        tasks = [asyncio.ensure_future(part) for part in (work, self._beats(seat), seat.told.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _beats(self, seat: _Seat) -> None:
        while True:
            should_be_ready = seat.state is EngineState.READY
            try:
                is_ready = await within(seat.engine.ready(), self._answer_s)
            except Exception as error:  # noqa: BLE001 - the boundary of a process
                return self._lose(seat, _words(error))
            if should_be_ready and not is_ready:
                return self._lose(seat, "its process was replaced, or somebody who waited for it in vain shut it")
            await asyncio.sleep(self._beat_s)

    def _lose(self, seat: _Seat, why: str) -> None:
        if seat.state is EngineState.LOST:
            return
        if seat.state in _PRESENT:
            seat.lost_at = asyncio.get_running_loop().time()
        seat.why = why
        self._move(seat, EngineState.LOST, why)
        seat.told.set()

    def _move(self, seat: _Seat, state: EngineState, why: str = "") -> None:
        before = seat.state
        if state not in _MOVES[before]:
            raise RuntimeError(f"rollout engine {seat.number} cannot go from {before.value} to {state.value}")
        seat.state = state
        was_lost = before not in _PRESENT
        seconds = asyncio.get_running_loop().time() - seat.lost_at if was_lost else 0.0
        self._report(EngineEvent(seat.number, before, state, why, seconds))

    def _check_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:  # a mistake of ours, or of who is told of the events
            self._crash = task.exception()
            self._none_left.set()

    def _obituary(self) -> BaseException:
        if self._crash is not None:
            return self._crash
        ends = "; ".join(f"engine {seat.number}: {seat.why}" for seat in self._seats)
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
