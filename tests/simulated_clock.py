"""An event loop with a simulated clock: nobody waits, time jumps to the next timer. A run repeats exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Deadlock", "SimulatedLoop", "simulate"]

T = TypeVar("T")


class Deadlock(Exception):  # noqa: N818 - it is what was found, not what went wrong in here
    """Everybody waits, and no timer will ever wake one of them."""


class _Clock:
    """Stands where the loop asks for events: there are none, so the time until the next timer passes at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock("all tasks wait, and nothing is scheduled")
        self.now += timeout
        return []


class SimulatedLoop(asyncio.BaseEventLoop):
    """One thread, no files, no sockets. Callbacks run in the order of their times, and of their scheduling."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Clock()

    def time(self) -> float:
        return self._selector.now

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        """Wakes a loop that sleeps; this one never does."""


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end in simulated time; what still runs then is cancelled."""
    loop = SimulatedLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_end_the_rest())
        loop.close()


async def _end_the_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
