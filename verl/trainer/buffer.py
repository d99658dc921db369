"""What feeds the loop: groups of episodes on their way, never more of them than the staleness allows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from verl.types import SampleHandle

__all__ = ["EpisodeBuffer"]

RunGroup = Callable[[int], Awaitable[list[SampleHandle]]]
"""Position in the data stream -> the finished samples of that prompt."""


class EpisodeBuffer:
    """Starts the episodes of prompts in the order of the data, and hands out finished groups in the same order.

    The law: a group may start only while fewer than `batch * (version + 1 + max_staleness)` groups have started, so no
    sample is ever trained more than `max_staleness` versions after the weights that wrote it. With 0 the loop is
    synchronous; with 1 generation runs one step ahead. The controller calls `advance` and `take`; nobody else does.
    """

    def __init__(self, run_group: RunGroup, batch: int, *, max_staleness: int = 0, position: int = 0) -> None:
        self._run_group, self._batch, self._max_staleness = run_group, batch, max_staleness
        self._started = position
        self._groups: deque[asyncio.Task[list[SampleHandle]]] = deque()

    def advance(self, version: int) -> None:
        """The engines hold `version` now: start what that allows."""
        limit = self._batch * (version + 1 + self._max_staleness)
        while self._started < limit:
            self._groups.append(asyncio.ensure_future(self._run_group(self._started)))
            self._started += 1

    async def take(self, count: int) -> list[SampleHandle]:
        """The samples of the `count` oldest groups, once they are all finished. A failed episode fails the wait."""
        if count > len(self._groups):
            raise RuntimeError(f"waiting for {count} groups while only {len(self._groups)} may run: a wait without end")
        groups = [self._groups.popleft() for _ in range(count)]
        try:
            return [handle for samples in await asyncio.gather(*groups) for handle in samples]
        except BaseException:
            for group in groups:
                group.cancel()
            raise

    async def close(self) -> None:
        """Give up what still runs."""
        for group in self._groups:
            group.cancel()
        await asyncio.gather(*self._groups, return_exceptions=True)
        self._groups.clear()
