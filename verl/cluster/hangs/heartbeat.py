"""Waiting for work without a deadline, as long as its process responds to pings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


class HeartbeatMonitor:
    """Pings one process at most once per `interval_s`, however many callers wait for it."""

    def __init__(self, ping: Callable[[], Awaitable[Any]], interval_s: float) -> None:
        self._ping, self._interval_s = ping, interval_s
        self._pending: asyncio.Future[Any] | None = None
        self._pinged_at = float("-inf")

    async def watch(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, or raise what `ping` raises when the process does not respond."""
        reply = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([reply], timeout=self._interval_s))[0]:
                await self._check()
            return reply.result()
        finally:
            reply.cancel()  # no effect if done

    async def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._pending is None or (self._pending.done() and now - self._pinged_at >= self._interval_s):
            self._pending, self._pinged_at = asyncio.ensure_future(self._ping()), now
        await asyncio.shield(self._pending)
