"""Supervision of rollout engines: restarts engines that fail, lets engines join and leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from verl.errors import EngineError, ProcessLostError, TrainerLostError
from verl.rollout.engine import EngineView, ManagedEngine
from verl.waiting import Waits, with_timeout
from verl.weights.sync import Receiver

T = TypeVar("T")
_log = logging.getLogger(__name__)

MAX_BACKOFF_S = 60.0
MAX_HEARTBEATS_PER_S = 10.0  # over all engines: hundreds of engines would keep the controller busy


class EngineState(Enum):
    """The lifecycle of an engine. Only ready and draining engines accept requests."""

    STARTING = "starting"  # up, before its first weights
    JOINING = "joining"  # added during the run, not up yet
    READY = "ready"
    LOST = "lost"
    RESTARTING = "restarting"
    SYNCING = "syncing"
    PROBING = "probing"
    GIVEN_UP = "given up"
    DRAINING = "draining"  # gets no new requests, finishes the running ones
    LEFT = "left"


_TRANSITIONS = {
    EngineState.STARTING: {EngineState.READY, EngineState.LOST, EngineState.DRAINING},
    EngineState.JOINING: {EngineState.SYNCING, EngineState.LOST, EngineState.LEFT},
    EngineState.READY: {EngineState.LOST, EngineState.DRAINING},
    EngineState.LOST: {EngineState.RESTARTING, EngineState.GIVEN_UP, EngineState.LEFT},
    EngineState.RESTARTING: {EngineState.SYNCING, EngineState.LOST, EngineState.LEFT},
    EngineState.SYNCING: {EngineState.PROBING, EngineState.LOST, EngineState.LEFT},
    EngineState.PROBING: {EngineState.READY, EngineState.LOST, EngineState.LEFT},
    EngineState.GIVEN_UP: {EngineState.LEFT},
    EngineState.DRAINING: {EngineState.LOST, EngineState.LEFT},
    EngineState.LEFT: set(),
}
_ACTIVE = (EngineState.STARTING, EngineState.READY, EngineState.DRAINING)  # take part in weight syncs
_STARTED = (*_ACTIVE, EngineState.SYNCING, EngineState.PROBING)
_LEAVING = (EngineState.DRAINING, EngineState.LEFT)


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """A change of an engine's state. `seconds` since the engine was lost, or was added; 0 if it is up."""

    engine_id: int
    previous: EngineState
    state: EngineState
    reason: str
    seconds: float
    joins: bool = False  # the engine was added during the run, and was not ready before this change

    def __str__(self) -> str:
        after = f" after {self.seconds:.0f} s" if self.seconds else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"rollout engine {self.engine_id} is {self.state.value}{after} (was {self.previous.value}){reason}"


@dataclass(eq=False)
class EngineSlot:
    """One engine and its state."""

    engine_id: int
    engine: ManagedEngine
    state: EngineState = EngineState.STARTING
    task: asyncio.Future[None] | None = None  # supervises the engine
    reason: str = ""  # why it was lost the last time
    down_since: float = 0.0
    joins: bool = False  # during the run, and was not ready yet
    shares_device: bool = False  # with the trainer
    was_lost: asyncio.Event = field(default_factory=asyncio.Event)
    is_silent: asyncio.Event = field(default_factory=asyncio.Event)  # none of its processes is enabled
    has_settled: asyncio.Event = field(default_factory=asyncio.Event)  # none of its processes is starting
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)  # none of its processes uses the device

    def __post_init__(self) -> None:
        self.is_silent.set()
        self.has_settled.set()
        if self.joins:
            self.state = EngineState.JOINING
            self.has_ended.set()


class EngineSupervisor:
    """Restarts rollout engines that fail. One per run, in the controller; the `Receivers` of the weight sync.

    Every `heartbeat_s` (with hundreds of engines less often) it asks each engine whether it is ready, and treats the
    engine as lost if there is no reply within `reply_timeout_s`; the weight sync reports losses, too. A lost engine is
    ended and started again (each within `start_timeout_s`), synced to the current weights and enabled. After
    `max_restarts` failures in a row the engine is given up and the run continues with the others; with none left,
    `run_while_available` and `active` raise. Every change of state is reported.

    Engines that share devices with the trainer (`shares_devices`: all, none, or their ids) sleep, and none of them
    starts, between `free_devices` and `allow_starts`. If only some do, pools send new requests to the others meanwhile.

    An engine that joins is started, synced, probed and enabled like one that was lost; then it is in the `view`, which
    pools, also in other processes, follow. An engine that leaves is withdrawn from the view, and finishes its requests.
    An id is never used twice.
    """

    def __init__(
        self,
        engines: Iterable[Any],
        report: Callable[[EngineEvent], None],
        *,
        heartbeat_s: float = 10.0,
        reply_timeout_s: float = 60.0,
        start_timeout_s: float = 1200.0,
        max_restarts: int = 5,
        backoff_s: float = 1.0,
        shares_devices: bool | Collection[int] = False,
    ) -> None:
        self._report, self.view = report, EngineView.of(engines)
        self._sharing = shares_devices
        self._slots = {
            engine_id: EngineSlot(engine_id, engine, shares_device=self._shares_device(engine_id))
            for engine_id, engine in self.view.engines.items()
        }
        self._next_id = len(self._slots)
        self._followers: list[Callable[[EngineView], Awaitable[None]]] = []
        self._heartbeat_s, self._reply_timeout_s = heartbeat_s, reply_timeout_s
        self._start_timeout_s = start_timeout_s
        self._max_restarts, self._backoff_s = max_restarts, backoff_s
        self._sync_one: Callable[[int], Awaitable[None]] | None = None
        self._publishing: asyncio.Future[Any] | None = None  # the event loop keeps only weak references
        self._has_failed = False
        self._waits = Waits()  # the callers of `run_while_available`
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._crash: BaseException | None = None

    def start(self, sync_one: Callable[[int], Awaitable[None]]) -> None:
        """Start supervising engines that are up; `sync_one` brings one of them to the current weights."""
        self._sync_one = sync_one
        for slot in self._slots.values():
            self._start_task(slot, self._supervise(slot))

    async def close(self) -> None:
        """Stop supervising. Call it before closing the engines, or they would be restarted."""
        tasks = [slot.task for slot in self._slots.values() if slot.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def add(self, spawn: Callable[[int], Any]) -> int:
        """Let an engine join during the run; return its id. `spawn` returns the engine, not yet started, for its id."""
        engine_id = self._next_id
        self._next_id += 1
        shares_device = self._shares_device(engine_id)
        slot = EngineSlot(engine_id, spawn(engine_id), joins=True, shares_device=shares_device)
        self._slots[engine_id] = slot
        slot.down_since = asyncio.get_running_loop().time()
        self._start_task(slot, self._supervise(slot))
        return engine_id

    async def remove(self, engine_id: int, *, drain_timeout_s: float) -> None:
        """Let an engine leave; return when its process has ended.

        The engine gets no new requests. Requests that still run after `drain_timeout_s` run again on other engines.
        """
        slot = self._slots[engine_id]
        if slot.state in _LEAVING:
            raise ValueError(f"rollout engine {engine_id} is already leaving")
        if all(other is slot or other.state in (*_LEAVING, EngineState.GIVEN_UP) for other in self._slots.values()):
            raise ValueError(f"rollout engine {engine_id} cannot leave: no other engine would be left")
        self._set_state(slot, EngineState.DRAINING if slot.state in _ACTIVE else EngineState.LEFT)
        withdrawal = self._publish({other: engine for other, engine in self.view.engines.items() if other != engine_id})
        if (supervision := slot.task) is not None:
            supervision.cancel()
        self._start_task(slot, self._leave(slot, supervision, withdrawal, drain_timeout_s))
        assert slot.task is not None
        await asyncio.shield(slot.task)  # it goes on if the caller does not wait

    def follow(self, follower: Callable[[EngineView], Awaitable[None]]) -> None:
        """Call `follower` with each new view; it returns when it has no request left on engines outside the view."""
        self._followers.append(follower)

    def _publish(
        self, engines: Mapping[int, Any] | None = None, asleep: frozenset[int] | None = None
    ) -> asyncio.Future[Any]:
        """Let pools send requests to `engines` only. The result is done when all followers have changed over."""
        self.view = EngineView(
            self.view.version + 1,
            self.view.engines if engines is None else engines,
            self.view.asleep if asleep is None else asleep,
        )
        return asyncio.gather(*(follower(self.view) for follower in self._followers))

    def _publish_sleep(self, asleep: Iterable[int]) -> None:
        """Let pools prefer engines that do not sleep, if there are any."""
        if not isinstance(self._sharing, bool) and self.view.asleep != (ids := frozenset(asleep)):
            self._start_publishing(self._publish(asleep=ids))

    def _start_publishing(self, publishing: asyncio.Future[Any]) -> None:
        self._publishing = publishing
        publishing.add_done_callback(self._on_task_done)

    async def run_while_available(self, work: Awaitable[T]) -> T:
        """Return the result of `work`; raise as soon as no engine is left that it could wait for."""
        if self._has_failed:
            asyncio.get_running_loop().call_soon(self._waits.interrupt, self._failure())
        return await self._waits.wait(work)

    @property
    def engines(self) -> list[Any]:
        """All engines, also engines that are not in the view."""
        return [slot.engine for slot in self._slots.values()]

    @property
    def states(self) -> dict[int, EngineState]:
        return {engine_id: slot.state for engine_id, slot in self._slots.items()}

    def __len__(self) -> int:
        return len(self._slots)

    def active(self) -> dict[int, Receiver]:
        if self._has_failed:
            raise self._failure()
        return {engine_id: slot.engine for engine_id, slot in self._slots.items() if slot.state in _ACTIVE}

    def get(self, engine_id: int) -> Receiver:
        if (slot := self._slots.get(engine_id)) is None:
            raise ProcessLostError(f"rollout engine {engine_id} has left")
        return slot.engine

    def mark_lost(self, engine_id: int, error: ProcessLostError) -> None:
        slot = self._slots.get(engine_id)
        if slot is not None and slot.state in _ACTIVE:  # else the loss is known, and the process is another one by now
            self._set_lost(slot, str(error))

    def mark_synced(self, engine_id: int) -> None:
        self._set_state(self._slots[engine_id], EngineState.PROBING)

    async def mark_ready(self, engine_id: int, version: int) -> None:
        slot = self._slots.get(engine_id)
        if slot is None or (state := slot.state) not in (EngineState.STARTING, EngineState.PROBING):
            return
        slot.is_silent.clear()
        await slot.engine.enable(version)
        if slot.state is not state:  # it was lost in the meantime, or leaves
            return
        self._set_state(slot, EngineState.READY)
        if engine_id not in self.view.engines:
            self._start_publishing(self._publish({**self.view.engines, engine_id: slot.engine}))

    @property
    def shares_devices(self) -> bool:
        """Whether engines share devices with the trainer."""
        return bool(self._sharing)

    @property
    def engines_of_trainer(self) -> list[Any]:
        """The engines that share devices with the trainer."""
        return [slot.engine for slot in self._slots.values() if slot.shares_device]

    def _shares_device(self, engine_id: int) -> bool:
        return self._sharing if isinstance(self._sharing, bool) else engine_id in self._sharing

    async def free_devices(self) -> None:
        self._may_start.clear()
        slots = [slot for slot in self._slots.values() if slot.shares_device]
        self._publish_sleep(slot.engine_id for slot in slots)
        await asyncio.gather(*(slot.has_settled.wait() for slot in slots))
        asleep = await asyncio.gather(*(self._put_to_sleep(slot) for slot in slots))
        for slot, is_asleep in zip(slots, asleep, strict=True):
            if not is_asleep:
                await self.run_while_available(slot.has_ended.wait())

    def allow_starts(self) -> None:
        self._may_start.set()
        self._publish_sleep(())

    async def _put_to_sleep(self, slot: EngineSlot) -> bool:
        """Return whether the engine sleeps; if not, it is lost, or has not started."""
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
        for slot in list(self._slots.values()):
            if slot.state not in _ACTIVE:
                await self.run_while_available(slot.is_silent.wait())

    def _start_task(self, slot: EngineSlot, work: Coroutine[Any, Any, None]) -> None:
        slot.task = asyncio.ensure_future(work)
        slot.task.add_done_callback(self._on_task_done)

    async def _supervise(self, slot: EngineSlot) -> None:
        while slot.state is not EngineState.GIVEN_UP:
            if slot.state is not EngineState.JOINING:
                await self._run_until_lost(slot, asyncio.get_running_loop().create_future())
            await self._bring_up(slot)

    async def _bring_up(self, slot: EngineSlot) -> None:
        """Start an engine that joins or was lost, until it is ready; give it up after `max_restarts` failures."""
        assert self._sync_one is not None, "start comes first"
        for attempt in range(self._max_restarts):
            if attempt:
                await asyncio.sleep(min(self._backoff_s * 2 ** (attempt - 1), MAX_BACKOFF_S))
            try:
                if slot.state is not EngineState.JOINING:
                    self._set_state(slot, EngineState.RESTARTING, slot.reason)
                    slot.was_lost.clear()
                    await self._end(slot)
                await self._start_process(slot)
                self._set_state(slot, EngineState.SYNCING)
                await self._run_until_lost(slot, self._sync_one(slot.engine_id))
            except TrainerLostError:  # ends the run, not the engine: `run_while_available` raises it
                raise
            except Exception as error:  # noqa: BLE001 - process boundary: any failure is retried
                _log.debug("rollout engine %d did not start", slot.engine_id, exc_info=True)
                self._set_lost(slot, str(error) or repr(error))
            if slot.state is EngineState.READY:
                return
        reason = f"{self._max_restarts} restarts in a row failed, the last one: {slot.reason}"
        self._set_state(slot, EngineState.GIVEN_UP, reason)
        await self._end_or_raise(slot, reason)
        self._fail_without_engines()

    async def _start_process(self, slot: EngineSlot) -> None:
        while slot.shares_device and not self._may_start.is_set():
            await self._may_start.wait()
        slot.has_settled.clear()
        slot.has_ended.clear()
        try:
            await with_timeout(slot.engine.start(), self._start_timeout_s)
        finally:
            slot.has_settled.set()

    async def _leave(
        self,
        slot: EngineSlot,
        supervision: asyncio.Future[None] | None,
        withdrawal: asyncio.Future[Any],
        drain_timeout_s: float,
    ) -> None:
        if supervision is not None:
            await asyncio.wait([supervision])
        if slot.state is EngineState.DRAINING:
            await self._run_until_lost(slot, asyncio.wait([withdrawal], timeout=drain_timeout_s))
        if slot.state is not EngineState.LEFT:
            self._set_state(slot, EngineState.LEFT)
        if not withdrawal.done():  # requests may still run here: they fail with the process, and run again elsewhere
            await self._end_or_raise(slot, "it was to leave")
        await withdrawal
        slot.is_silent.set()
        with contextlib.suppress(Exception):  # process boundary
            await with_timeout(slot.engine.close(), self._start_timeout_s)
            slot.has_ended.set()
        self._check_ended(slot, "it was to leave")
        del self._slots[slot.engine_id]
        self._fail_without_engines()

    async def _end(self, slot: EngineSlot) -> None:
        await with_timeout(slot.engine.end(), self._start_timeout_s)  # the replacing process must come up, too
        slot.is_silent.set()
        slot.has_ended.set()

    async def _end_or_raise(self, slot: EngineSlot, reason: str) -> None:
        with contextlib.suppress(Exception):  # process boundary
            await self._end(slot)
        self._check_ended(slot, reason)

    def _check_ended(self, slot: EngineSlot, reason: str) -> None:
        """Raise if an engine that will not be started again may still serve requests or use a shared device."""
        must_end = slot.has_ended if slot.shares_device else slot.is_silent
        if not must_end.is_set():  # its machine may only be unreachable from here
            raise ProcessLostError(
                f"rollout engine {slot.engine_id} could not be ended, and may still serve old weights or use its "
                f"device: {reason}"
            )

    async def _run_until_lost(self, slot: EngineSlot, work: Awaitable[Any]) -> None:
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
            slot.down_since = asyncio.get_running_loop().time()
        slot.reason = reason
        self._set_state(slot, EngineState.LOST, reason)
        slot.was_lost.set()

    def _set_state(self, slot: EngineSlot, state: EngineState, reason: str = "") -> None:
        previous = slot.state
        if state not in _TRANSITIONS[previous]:
            raise RuntimeError(f"rollout engine {slot.engine_id} cannot go from {previous.value} to {state.value}")
        slot.state = state
        seconds = 0.0 if previous in _ACTIVE else asyncio.get_running_loop().time() - slot.down_since
        event = EngineEvent(slot.engine_id, previous, state, reason, seconds, slot.joins)
        slot.joins &= state is not EngineState.READY
        self._report(event)

    def _on_task_done(self, task: asyncio.Future[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:  # a bug, an error of `report`, or the trainer is lost
            self._crash = task.exception()
            self._fail()

    def _fail_without_engines(self) -> None:
        if all(slot.state is EngineState.GIVEN_UP for slot in self._slots.values()):
            self._fail()

    def _fail(self) -> None:
        self._has_failed = True
        self._waits.interrupt(self._failure())

    def _failure(self) -> BaseException:
        if self._crash is not None:
            return self._crash
        causes = "; ".join(f"engine {slot.engine_id}: {slot.reason}" for slot in self._slots.values())
        return EngineError(
            f"All rollout engines failed after {self._max_restarts} restarts each. {causes}. Fix the cause and rerun: "
            "the run resumes from its last checkpoint (trainer.resume_mode=auto)."
        )
