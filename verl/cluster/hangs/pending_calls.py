"""The calls that this process waits for. Each has an action, a target and a timeout (`trainer.deadlines`); the
watchdog checks them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from verl.config.schema.trainer import DeadlinesConfig
from verl.waiting import Waits

T = TypeVar("T")

UNLIMITED_S = 30 * 86_400.0

MARGIN_S = 60.0
"""Added to timeouts of others around the same call, so that the tracked call, which is reported, expires first."""


class Timeout(NamedTuple):
    """A duration and the setting that it comes from, for messages."""

    seconds: float
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.setting}={self.seconds:g}" if self.setting else f"{self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The timeouts of a run, one for each kind of call."""

    devices: Timeout
    start: Timeout
    generation: Timeout
    train: Timeout
    weights: Timeout
    checkpoint: Timeout
    reply: Timeout
    close: Timeout

    @property
    def longest_s(self) -> float:
        return max(getattr(self, name).seconds for name in DeadlinesConfig.model_fields)

    @classmethod
    def from_config(cls, section: DeadlinesConfig) -> Timeouts:
        return cls(**{name: Timeout(seconds, f"trainer.deadlines.{name}") for name, seconds in section})

    @classmethod
    def unlimited(cls) -> Timeouts:
        """Return timeouts for a run in one process, where a debugger may stop everything."""
        return cls(**{name: Timeout(UNLIMITED_S) for name in DeadlinesConfig.model_fields})


DEFAULT_TIMEOUTS = Timeouts.from_config(DeadlinesConfig())


@dataclass(frozen=True, slots=True, order=True)
class CallTarget:
    """What a call waits for: a kind of process, such as "train worker", and its index."""

    kind: str
    index: int | None = None

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind} {self.index}"


def format_targets(targets: Sequence[CallTarget]) -> str:
    """Return targets of one kind in short form: "train workers 0-2, 5"."""
    kind, indices = targets[0].kind, sorted({target.index for target in targets if target.index is not None})
    if len(indices) < 2:
        return str(targets[0])
    runs = [[index for _, index in run] for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    return f"{kind}s " + ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


@dataclass(slots=True)
class Progress:
    """When a target last finished anything: the timeout of calls that share it starts from there."""

    finished_at: float = float("-inf")


@dataclass(eq=False, slots=True)
class PendingCall:
    """A call that has not returned yet."""

    action: str
    target: CallTarget
    timeout: Timeout
    clock: Callable[[], float]
    progress: Progress = field(default_factory=Progress)
    peers: int = 0  # size of the group that got the same call, such as the ranks of a model
    started_at: float = 0.0
    report: str = ""  # path, once the watchdog has written one

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    @property
    def key(self) -> tuple[str, CallTarget]:
        return self.action, self.target

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call started, or since its target last finished anything."""
        return self.clock() - max(self.started_at, self.progress.finished_at)

    @property
    def remaining_s(self) -> float:
        return self.timeout.seconds - self.elapsed_s


class PendingCalls:
    """The pending calls of one process. Thread-safe: the watchdog reads them from its own thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._calls: dict[int, PendingCall] = {}
        self.clock = clock
        self.is_watched = False

    @contextmanager
    def track_call(
        self, action: str, *, target: CallTarget, timeout: Timeout, progress: Progress | None = None, peers: int = 0
    ) -> Iterator[PendingCall]:
        """Register a call while the block runs. The caller enforces the timeout itself."""
        call = PendingCall(action, target, timeout, self.clock, progress or Progress(), peers)
        self._calls[id(call)] = call
        try:
            yield call
        finally:
            del self._calls[id(call)]

    def list_calls(self) -> list[PendingCall]:
        """Return the calls, the oldest first."""
        return sorted(self._calls.copy().values(), key=lambda call: call.started_at)

    async def format_report_hint(self, call: PendingCall, *, timeout_s: float = 25.0) -> str:
        """Wait for the watchdog's report on an overdue call; return a sentence that names it, or nothing."""
        until = time.monotonic() + timeout_s
        while self.is_watched and not call.report and time.monotonic() < until:
            await asyncio.sleep(0.1)
        return f" Pending calls and stack traces: {call.report}" if call.report else ""


class HeartbeatMonitor:
    """Waits for work that may take any time as long as its process responds to pings.

    The process is pinged once per `interval_s`, however many callers wait.
    """

    def __init__(self, ping: Callable[[], Awaitable[Any]], interval_s: float) -> None:
        self._ping, self._interval_s = ping, interval_s
        self._waits = Waits()
        self._pings: asyncio.Task[None] | None = None

    async def watch(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, or raise what `ping` raises when the process does not respond."""
        if self._pings is None:
            self._pings = asyncio.ensure_future(self._send_pings())
        try:
            return await self._waits.wait(work)
        finally:
            if not self._waits and self._pings is not None:
                self._pings.cancel()
                self._pings = None

    async def _send_pings(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                await self._ping()
        except Exception as error:  # noqa: BLE001 - process boundary
            self._waits.interrupt(error)


PENDING_CALLS = PendingCalls()  # the calls of this process
track_call, format_report_hint = PENDING_CALLS.track_call, PENDING_CALLS.format_report_hint
