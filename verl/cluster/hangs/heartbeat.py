"""Waiting for work that may take as long as it likes, of a process that must show that it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

__all__ = ["HeartbeatMonitor"]

T = TypeVar("T")


class HeartbeatMonitor:
    """Many may wait for one process; it is asked whether it is there every `every_s` seconds, however many they are."""

    def __init__(self, is_there: Callable[[], Awaitable[Any]], every_s: float) -> None:
        self._is_there, self._every_s = is_there, every_s
        self._question: asyncio.Future[Any] | None = None
        self._asked = float("-inf")

    async def watch(self, work: Awaitable[T]) -> T:
        """The result of `work`; or what `is_there` raises, when the process does not answer that."""
        answer = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([answer], timeout=self._every_s))[0]:
                await self._still_there()
            return answer.result()
        finally:
            answer.cancel()  # of no effect on one that is done

    async def _still_there(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._question is None or (self._question.done() and now - self._asked >= self._every_s):
            self._question, self._asked = asyncio.ensure_future(self._is_there()), now
        await asyncio.shield(self._question)
