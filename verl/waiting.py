"""Waits for work in the current task, with a timeout or until other work fails.

Thousands of calls are awaited at once, so none of these starts a task of its own.
`EventLoopThread` runs work in another thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def with_timeout(work: Awaitable[T], seconds: float | Callable[[], float]) -> T:
    """Return the result of `work`, or raise a `TimeoutError` that says how long it waited.

    `seconds` may be a function that returns the remaining seconds, so that a timeout can be extended.
    """
    loop, scope = asyncio.get_running_loop(), asyncio.timeout(None)
    start = loop.time()
    remaining_s = seconds if callable(seconds) else lambda: start + seconds - loop.time()
    try:
        async with scope:
            alarm = _Alarm(scope, remaining_s)
            try:
                return await work
            finally:
                alarm.timer.cancel()
    except TimeoutError as error:
        if scope.expired():
            raise TimeoutError(f"no reply within {loop.time() - start:.0f} s") from error
        raise


class _Alarm:
    """Ends a scope when no seconds remain. Not a closure, which would refer to itself: garbage to be collected."""

    def __init__(self, scope: asyncio.Timeout, remaining_s: Callable[[], float]) -> None:
        self._scope, self._remaining_s, self._loop = scope, remaining_s, asyncio.get_running_loop()
        self.timer = self._loop.call_later(max(0.0, remaining_s()), self._ring)

    def _ring(self) -> None:
        if (seconds := self._remaining_s()) > 0:
            self.timer = self._loop.call_later(seconds, self._ring)
        else:
            self._scope.reschedule(self._loop.time())


class Waits:
    """Waits that can be ended together."""

    def __init__(self) -> None:
        self._scopes: dict[asyncio.Timeout, None] = {}  # in order
        self._error: BaseException | None = None

    def __bool__(self) -> bool:
        return bool(self._scopes)

    async def wait(self, work: Awaitable[T]) -> T:
        """Return the result of `work`; or cancel it and raise the error of `interrupt`."""
        scope = asyncio.timeout(None)
        self._scopes[scope] = None
        try:
            async with scope:
                return await work
        except TimeoutError:
            if scope.expired() and self._error is not None:
                raise self._error from None
            raise
        finally:
            del self._scopes[scope]

    def interrupt(self, error: BaseException) -> None:
        """End all waits that have begun."""
        self._error = error
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(now)


class EventLoopThread:
    """An event loop in a daemon thread, which callers on any thread give coroutines to."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self, *, wait: bool = True) -> None:
        """Stop the loop. If `wait` is false, work that blocks the thread may go on."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        if wait:
            self._thread.join()
            self.loop.close()
