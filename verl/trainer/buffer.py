"""What feeds the loop: groups of episodes on their way, never more of them than the staleness allows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from verl.data.stream import PromptStream
from verl.errors import WeightSyncError
from verl.types import SampleHandle

__all__ = ["EpisodeBuffer"]

RunGroup = Callable[[int, int], Awaitable[list[SampleHandle]]]
"""(position in the data stream, row of the data) -> the finished samples of that prompt."""


class EpisodeBuffer:
    """Starts the episodes of prompts in the order of the stream, and hands out finished groups in the same order.

    The law: with the weights of version v in the engines, at most `batch * (v + 1 + max_staleness)` groups have started
    (counted from the version that the run began with), so no sample is trained more than `max_staleness` versions after
    the weights that wrote it. With 0 the loop is synchronous; with 1 generation runs one step ahead. The controller
    calls `advance` and `take`; nobody else does.
    """

    def __init__(self, run_group: RunGroup, stream: PromptStream, batch: int, *, max_staleness: int = 0) -> None:
        self._run_group, self._stream, self._batch, self._max_staleness = run_group, stream, batch, max_staleness
        self._groups: deque[asyncio.Task[list[SampleHandle]]] = deque()
        self._first: int | None = None  # version that the run began with
        self._version = 0
        self._started = 0

    def advance(self, version: int) -> None:
        """The engines hold `version` now: start what that allows."""
        self._first = version if self._first is None else self._first
        self._version = version
        while self._started < self._batch * (version - self._first + 1 + self._max_staleness):
            self._groups.append(asyncio.ensure_future(self._run_group(*next(self._stream))))
            self._started += 1

    async def take(self, count: int) -> list[SampleHandle]:
        """The samples of the `count` oldest groups, once they are all finished. A failed episode fails the wait."""
        if count > len(self._groups):
            raise RuntimeError(f"waiting for {count} groups while only {len(self._groups)} may run: a wait without end")
        groups = [self._groups.popleft() for _ in range(count)]
        try:
            samples = [sample for group in await asyncio.gather(*groups) for sample in group]
        except BaseException:
            for group in groups:
                group.cancel()
            raise
        oldest = min(sample.version for sample in samples)
        if self._version - oldest > self._max_staleness:
            raise WeightSyncError(
                f"an answer was written by version {oldest} of the weights, and version {self._version} is about to be "
                f"trained on it: at most {self._max_staleness} behind is allowed (trainer.max_staleness)"
            )
        return samples

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the place in the data, without the groups that are not trained on yet: they run again."""
        return self._stream.state() | {"position": self._stream.position - len(self._groups)}

    async def close(self) -> None:
        """Give up what still runs."""
        for group in self._groups:
            group.cancel()
        await asyncio.gather(*self._groups, return_exceptions=True)
        self._groups.clear()
