"""Stopping a run before its last step: on a signal, or because its time is nearly over."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

TERMINATED = 128 + signal.SIGTERM
OUT_OF_TIME = os.EX_TEMPFAIL
"""Exit codes of a run that has saved and stopped before its last step; it resumes when it is started again."""
ONE_REQUEST_S = 1.0  # `timeout` signals the process and its group, Slurm a task and the `srun` that passes it on


class StopController:
    """Decides whether a run should stop now. The loop asks before its first step, after each, and after validations.

    A run with a time limit stops when the longest step, the longest save so far and `margin_s` exceed the time left.
    The first step always runs, so that a run makes progress with every start.
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
        self._request_count = 0
        self._requested = asyncio.Event()
        self._last_request = -math.inf
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
        """Stop `max_hours` from now or at the end of the Slurm job, whichever is sooner."""
        limits = []
        if max_hours is not None:
            limits.append((clock() + max_hours * 3600, f"trainer.max_hours={max_hours:g}"))
        if (end := environment.get("SLURM_JOB_END_TIME", "")).isdecimal():
            limits.append((float(end), "the end of the Slurm job"))
        ends_at, limit = min(limits, default=(None, ""))
        return cls(ends_at, limit, margin_s=margin_s, clock=clock)

    def describe_limit(self) -> str | None:
        if self._ends_at is None:
            return None
        hours = (self._ends_at - self._clock()) / 3600
        return f"the run saves and stops in time for {self._limit}, in {hours:.2g} hours"

    def begin(self) -> None:
        """Start timing: the first step begins, or the first after a restart."""
        self._last = self._clock()

    def record_step(self) -> None:
        """Count the time since the last call, or since `begin`, as one step."""
        now = self._clock()
        self._longest_s = max(self._longest_s, now - self._last)
        self._last = now

    def request_stop(self) -> None:
        """Stop after the step in progress."""
        self._request_count += 1
        self._requested.set()

    async def run_unless_stopped(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Run `work`, but cancel it as soon as a stop is requested; return whether it has finished."""
        if self._request_count:
            return False
        working, requested = asyncio.ensure_future(work()), asyncio.ensure_future(self._requested.wait())
        try:
            await asyncio.wait([working, requested], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return working.done()
        finally:
            working.cancel()
            requested.cancel()
            await asyncio.gather(working, requested, return_exceptions=True)

    def reason(self, longest_save_s: float = 0.0) -> str | None:
        """Return why the run should stop now, None to continue. The longest save is remembered over restarts."""
        self._longest_save_s = max(self._longest_save_s, longest_save_s)
        if self._request_count:
            self.exit_code = TERMINATED
            return "asked to stop (SIGTERM)"
        if self._ends_at is None or not self._longest_s:
            return None
        left, needed = self._ends_at - self._clock(), self._longest_s + self._longest_save_s + self._margin_s
        if left >= needed:
            return None
        self.exit_code = OUT_OF_TIME
        return (
            f"{max(left, 0):.0f} s are left until {self._limit}, and another step could need {needed:.0f} s (the "
            f"longest so far took {self._longest_s:.0f} s, a checkpoint {self._longest_save_s:.0f} s; margin "
            f"{self._margin_s:.0f} s)"
        )

    @contextmanager
    def on_sigterm(self, say: Callable[[str], None]) -> Iterator[None]:
        """Stop after the step in progress on SIGTERM; cancel at once on a second one, or one during the start.

        Signals that arrive within `ONE_REQUEST_S` of each other count as one.
        `say` tells the user that the signal has arrived. Only the main thread can handle signals: in another thread (a
        notebook) this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        task = asyncio.current_task()
        assert task is not None

        def handle() -> None:
            before, self._last_request = self._last_request, self._clock()
            if self._last_request - before < ONE_REQUEST_S:
                return
            self.request_stop()
            if self._request_count > 1 or self.is_starting:
                self.exit_code = TERMINATED
                task.cancel()
            else:
                say("SIGTERM: saving after the step in progress; a second SIGTERM ends the run at once")

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, handle)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
