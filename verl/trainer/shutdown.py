"""Ending a run before its last step: asked to by a signal, or because its time is nearly over."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["OUT_OF_TIME", "TERMINATED", "StopController"]

TERMINATED = 128 + signal.SIGTERM
OUT_OF_TIME = os.EX_TEMPFAIL
"""Exit codes of a run that has saved and ended before its last step; started again, it goes on."""


class StopController:
    """Whether the run should end now, and why. The loop asks before its first step, after each, and after validations.

    A deadline is kept by what was seen so far: another step is begun if the longest step, the longest save and
    `margin_s` fit before it. The first step is always begun: a run that makes one in every start gets on.
    """

    def __init__(
        self,
        ends_at: float | None = None,
        limit: str = "",
        *,
        margin_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ends_at, self._limit, self._margin_s, self._clock = ends_at, limit, margin_s, clock
        self._asked = 0
        self._is_asked = asyncio.Event()
        self.is_starting = False  # there is nothing to save yet
        self._last = clock()
        self._longest_s = self._longest_save_s = 0.0
        self.exit_code = 0

    @classmethod
    def by_time(
        cls,
        max_hours: float | None,
        margin_s: float,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
    ) -> StopController:
        """The sooner of so many hours from now and the end of the Slurm job, if there are such."""
        limits = []
        if max_hours is not None:
            limits.append((clock() + max_hours * 3600, f"trainer.max_hours={max_hours:g}"))
        if (end := environment.get("SLURM_JOB_END_TIME", "")).isdecimal():
            limits.append((float(end), "the end of the Slurm job"))
        ends_at, limit = min(limits, default=(None, ""))
        return cls(ends_at, limit, margin_s=margin_s, clock=clock)

    def describe_deadline(self) -> str | None:
        """What a deadline means for the run, in words."""
        if self._ends_at is None:
            return None
        hours = (self._ends_at - self._clock()) / 3600
        return f"the run saves and ends in time for {self._limit}, in {hours:.2g} hours"

    def begin(self) -> None:
        """The first step begins, or the first after a restart."""
        self._last = self._clock()

    def record_step(self) -> None:
        """A step is over: all that happened since the last call was a part of it."""
        now = self._clock()
        self._longest_s = max(self._longest_s, now - self._last)
        self._last = now

    def request_stop(self) -> None:
        """End after the step in progress."""
        self._asked += 1
        self._is_asked.set()

    async def run_unless_stopped(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Do `work`, but break it off as soon as the run is asked to end; whether it was done."""
        if self._asked:
            return False
        working, asked = asyncio.ensure_future(work()), asyncio.ensure_future(self._is_asked.wait())
        try:
            await asyncio.wait([working, asked], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return working.done()
        finally:
            working.cancel()
            asked.cancel()
            await asyncio.gather(working, asked, return_exceptions=True)

    def reason(self, longest_save_s: float = 0.0) -> str | None:
        """Why the run should end now, in words; None: it goes on. What a save took is remembered over restarts."""
        self._longest_save_s = max(self._longest_save_s, longest_save_s)
        if self._asked:
            self.exit_code = TERMINATED
            return "asked to end (SIGTERM)"
        if self._ends_at is None or not self._longest_s:
            return None
        left, needed = self._ends_at - self._clock(), self._longest_s + self._longest_save_s + self._margin_s
        if left >= needed:
            return None
        self.exit_code = OUT_OF_TIME
        return (
            f"{max(left, 0):.0f} s are left until {self._limit}, and another step could need {needed:.0f} s (the "
            f"longest so far took {self._longest_s:.0f} s, a checkpoint {self._longest_save_s:.0f} s; "
            f"{self._margin_s:.0f} s to spare)"
        )

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """SIGTERM ends the run after the step in progress; a second one, or one in its start, cancels what is going on.

        Only the main thread hears signals: a run beside a notebook's event loop is left to the notebook.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        task = asyncio.current_task()
        assert task is not None

        def asked() -> None:
            self.request_stop()
            if self._asked > 1 or self.is_starting:
                self.exit_code = TERMINATED
                task.cancel()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, asked)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
