"""Clocks of episodes and calls, which stop while these wait for something that other episodes hold.

Such waits are for a session of a tool server, an event loop of code that blocks, or the machine's turn to run a
program. A timeout compares with a clock, so nothing exceeds it only because others were first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Clock:
    """Counts seconds from its creation."""

    def __init__(self) -> None:
        self._start = self._stopped_at = time.monotonic()
        self._waits = 0  # calls of an episode may wait at the same time

    def read(self) -> float:
        return (self._stopped_at if self._waits else time.monotonic()) - self._start

    def stop(self) -> None:
        self._stopped_at = self._start + self.read()
        self._waits += 1

    def resume(self) -> None:
        self._waits -= 1
        if not self._waits:
            self._start += time.monotonic() - self._stopped_at


_clocks: ContextVar[tuple[Clock, ...]] = ContextVar("clocks", default=())  # of the episode, then of the call
_lock = threading.Lock()  # the event loops of the worker and of the user stop the same clocks


@contextmanager
def start_clock() -> Iterator[Clock]:
    """Return a new clock, which waits stop in tasks that are created in this block."""
    token = _clocks.set((*_clocks.get(), clock := Clock()))
    try:
        yield clock
    finally:
        _clocks.reset(token)


@contextmanager
def stop_clocks() -> Iterator[None]:
    """Stop the clocks of the current episode and call during this block."""
    clocks = _clocks.get()
    with _lock:
        for clock in clocks:
            clock.stop()
    try:
        yield
    finally:
        with _lock:
            for clock in clocks:
                clock.resume()
