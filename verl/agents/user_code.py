"""Runs code of the user off the event loop of the worker, so that timeouts hold whatever the code does.

Coroutines share an event loop in a thread of its own, and thereby their clients and locks. A coroutine that blocks this
loop for `WATCH_S` is reported with its stack, and the loop is replaced: the other calls raise `LoopBlockedError`, so
that their episodes are repeated, and the code that blocked gets event loops of its own from then on, up to
`MAX_OWN_LOOPS`. A function that is not a coroutine gets a thread for each call; tool functions that block run in
processes (`tools/processes.py`).

A thread cannot be killed. Code that exceeds its timeout is asked to end, and while `MAX_ABANDONED` calls have not
ended, no further one starts. Code that holds the GIL, such as a regular expression that backtracks, stalls the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import logging
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from verl.agents.clock import Clock, start_clock, stop_clocks
from verl.agents.errors import LoopBlockedError, ToolFailureError
from verl.redaction import redact

T = TypeVar("T")
_log = logging.getLogger(__name__)
SETTING = "actor_rollout_ref.rollout.multi_turn.tool_deadline_s"
WATCH_S = 5.0  # a task that holds its event loop for so long blocks it
MAX_OWN_LOOPS = 64  # per worker, for each function or class that has blocked; further episodes wait
MAX_ABANDONED = 32  # per worker
_SETTLE_S = 0.05  # in which calls of a replaced loop raise, and a stopped clock is read again


class Abandoned(BaseException):
    """Raised in a thread whose call exceeded its timeout. User code that catches `Exception` does not catch it."""


class Call:
    """A call of user code in a thread."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.task: asyncio.Task[Any] | None = None  # on an event loop
        self.waiter: asyncio.Future[Any] | None = None  # on the event loop of the worker
        self.is_held_up = self._has_ended = False

    def abandon(self) -> None:
        """Count a call for which nobody waits any longer until it ends."""
        _abandoned[self] = None
        if self._has_ended:
            _abandoned.pop(self, None)

    def end(self) -> None:
        self._has_ended = True
        _abandoned.pop(self, None)


class UserLoop:
    """An event loop for coroutines of the user, in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._calls: dict[Call, None] = {}  # in order
        self.is_retired = False  # accepts no further calls
        self._watching: asyncio.Task[bool] | None = None
        self._thread = threading.Thread(target=self._serve, name="user-code", daemon=True)
        self._thread.start()

    async def run(self, owner: str, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """Return the result of a coroutine function. Raise `LoopBlockedError` if another call blocks the loop."""
        _refuse_if_stuck()
        if self.is_retired:
            raise LoopBlockedError(f"the event loop of {owner} was replaced, because other code blocked it")
        call = Call(owner)
        self._calls[call] = None
        work = self._track(call, function, *args, **kwargs)
        call.waiter = waiter = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        try:
            while not (await asyncio.wait([waiter], timeout=WATCH_S))[0]:
                if self._watching is None or self._watching.done():
                    self._watching = asyncio.ensure_future(replace_blocked_loop())
            return waiter.result()
        except asyncio.CancelledError:
            if call.is_held_up:
                raise LoopBlockedError(f"{owner} was held up by code that blocks its event loop") from None
            self._abandon(call)
            raise

    async def _track(self, call: Call, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        call.task = asyncio.current_task()
        try:
            return await survive_exit(function(*args, **kwargs))
        finally:
            call.end()
            self._calls.pop(call, None)
            self._stop_if_done()

    def _abandon(self, call: Call) -> None:
        assert call.waiter is not None
        call.waiter.cancel()  # cancels the coroutine, which may take note of it or not
        if call in self._calls:
            call.abandon()
        if self is not _shared and call.task is not None and asyncio.current_task(self._loop) is call.task:
            _interrupt(self._thread)

    async def is_blocked(self) -> bool:
        """Return whether the loop does not respond for `WATCH_S`, and not because many tasks take turns."""
        current, answer = asyncio.current_task(self._loop), Future[None]()
        self._loop.call_soon_threadsafe(answer.set_result, None)
        for _ in range(10):
            done, _ = await asyncio.wait([asyncio.wrap_future(answer)], timeout=WATCH_S / 10)
            if done or asyncio.current_task(self._loop) is not current:
                return False
        return True

    def replace(self) -> None:
        """Report what blocks the loop, and end all other calls: their episodes are repeated on another loop.

        If a callback or a task that user code has started blocks the loop, nobody knows to which call it belongs.
        """
        current, calls = asyncio.current_task(self._loop), list(self._calls)
        culprits = [call for call in calls if call.task is current and current is not None]
        owners = {call.owner for call in culprits or calls}
        for owner in owners:
            _blocking.setdefault(owner, asyncio.Semaphore(MAX_OWN_LOOPS))
        _log.warning(
            "%s blocks the event loop of the user's coroutines, and gets event loops of its own from now on; %d other "
            "calls are repeated. Use await, or asyncio.to_thread, or do not declare it async. It is here:\n%s",
            " or ".join(sorted(owners)) or "a callback",
            len(calls) - len(culprits),
            describe_stack(self._thread),
        )
        for call in calls:
            if call not in culprits and call.waiter is not None and not call.waiter.done():
                call.is_held_up = True
                call.waiter.get_loop().call_soon_threadsafe(call.waiter.cancel)
        self.retire()

    def retire(self) -> None:
        """End the thread when the last call has ended."""
        self.is_retired = True
        self._loop.call_soon_threadsafe(self._stop_if_done)

    def _stop_if_done(self) -> None:
        if self.is_retired and not self._calls:
            self._loop.stop()

    def _serve(self) -> None:
        while not self.is_retired or self._calls:
            with suppress(BaseException):  # a task that exits, or stops the loop, does not end it for others
                self._loop.run_forever()
        with suppress(BaseException):
            self._loop.run_until_complete(_cancel_all())
            self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_shared: UserLoop | None = None
_blocking: dict[str, asyncio.Semaphore] = {}  # owners that have blocked the shared loop -> their own loops
_abandoned: dict[Call, None] = {}


class UserCode:
    """The code of a function or class of the user in one episode. All of its coroutines run on the same event loop.

    Code that has blocked waits for a loop of its own when it is entered. The episodes enter all code in the same order,
    so no two wait for each other.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = f"{getattr(owner, '__module__', '')}.{getattr(owner, '__qualname__', type(owner).__qualname__)}"
        self._loop: UserLoop | None = None
        self._slots: asyncio.Semaphore | None = None

    async def __aenter__(self) -> UserCode:
        if slots := _blocking.get(self._owner):
            with stop_clocks():
                await slots.acquire()
            self._slots, self._loop = slots, UserLoop()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._loop is not None and self._loop is not _shared:
            self._loop.retire()
        if self._slots is not None:
            self._slots.release()

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, which may be a coroutine function, return an awaitable, or block."""
        global _shared
        if self._loop is None and self._owner in _blocking:
            raise LoopBlockedError(f"{self._owner} needs an event loop of its own, because it has blocked another")
        if self._loop is None:
            self._loop = _shared = _shared or UserLoop()
        return await self._loop.run(self._owner, call_method, function, *args, **kwargs)

    def leave_retired_loop(self) -> None:
        """Run further calls elsewhere if the loop was replaced between two calls, which otherwise ends the episode."""
        if self._loop is not None and self._loop.is_retired:
            self._loop = UserLoop() if self._owner in _blocking else None


async def replace_blocked_loop() -> bool:
    """Replace the shared loop if one task or callback blocks it, and return whether one does."""
    global _shared
    loop = _shared
    if loop is None or not await loop.is_blocked():
        return False
    if loop is _shared:
        _shared = None
        loop.replace()
    return True


async def ends_in_time(task: asyncio.Future[Any], clock: Clock, timeout_s: float) -> bool:
    """Return whether a task ends before its clock shows the timeout.

    A task that blocking code has held up ends with `LoopBlockedError`.
    """
    while not task.done() and (remaining_s := timeout_s - clock.read()) > 0:
        await asyncio.wait([task], timeout=max(remaining_s, _SETTLE_S))
    if not task.done() and await replace_blocked_loop():
        await asyncio.wait([task], timeout=_SETTLE_S)
    return task.done()


async def run_with_timeout(work: Awaitable[T], timeout_s: float, name: str) -> T:
    """Return the result, or raise `ToolFailureError` after the timeout, even if the work ignores its cancellation."""
    with start_clock() as clock:
        task = asyncio.ensure_future(work)
    try:
        if not await ends_in_time(task, clock, timeout_s):
            raise ToolFailureError(f"{name} did not return within {timeout_s:g} s ({SETTING})")
    finally:
        task.cancel()  # no effect once it is done
    return task.result()


async def survive_exit(work: Awaitable[T]) -> T:
    """Return the result. Convert SystemExit to RuntimeError: an event loop would re-raise it and end the worker."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r})") from error


async def close_quietly(
    code: UserCode, method: Callable[..., Any], *args: Any, timeout_s: float, **kwargs: Any
) -> None:
    """Call a method that releases something. Log its failure, which does not change the result of the episode."""
    name = getattr(method, "__qualname__", "close")
    code.leave_retired_loop()
    try:
        await run_with_timeout(code.run(method, *args, **kwargs), timeout_s, name)
    except Exception as error:  # noqa: BLE001 - the user's code
        _log.warning("%s failed: %s: %s", name, type(error).__name__, redact(str(error)))


async def call_method(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method, which may be a coroutine function, return an awaitable, or block, on the current event loop."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    result = await run_in_thread(lambda: method(*args, **kwargs))
    return await result if inspect.isawaitable(result) else result


def run_in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Call a function in a new thread. Unlike threads of an executor, a thread that never ends delays no other call."""
    _refuse_if_stuck()
    call, result = Call(getattr(function, "__qualname__", "a function")), Future[T]()
    result.set_running_or_notify_cancel()  # cancelling the call does not end the thread

    def run() -> None:
        try:
            result.set_result(function())
        except SystemExit as error:
            result.set_exception(RuntimeError(f"sys.exit({error.code!r})"))
        except StopIteration as error:  # asyncio's futures do not accept it
            result.set_exception(RuntimeError(repr(error)))
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            result.set_exception(error)
        finally:
            call.end()

    def abandon(waiter: asyncio.Future[T]) -> None:
        if waiter.cancelled() and not result.done():
            _log.warning("a call exceeded its timeout and has not ended. It is here:\n%s", describe_stack(thread))
            call.abandon()
            _interrupt(thread)

    thread = threading.Thread(target=run, daemon=True, name="agent-call")
    thread.start()
    waiter = asyncio.wrap_future(result)
    waiter.add_done_callback(abandon)
    return waiter


def describe_stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)[-8:]).rstrip()


def _refuse_if_stuck() -> None:
    if len(_abandoned) >= MAX_ABANDONED:
        owners = ", ".join(sorted({call.owner for call in list(_abandoned)}))
        raise ToolFailureError(
            f"{len(_abandoned)} calls that exceeded their timeout have not ended, so no further one starts: {owners}; "
            "let the code end by itself, with timeouts of its own"
        )


def _interrupt(thread: threading.Thread) -> None:
    """Raise `Abandoned` in a thread when it next runs Python code; a blocking system call returns first."""
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Abandoned))
