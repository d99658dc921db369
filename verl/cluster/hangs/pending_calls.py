"""What this process waits for: every wait on another process has a name, an owner and a deadline.

The waits of a process are open to its watchdog (`watchdog.py`), which says who waits for whom, and since when.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from verl.config.schema.trainer import DeadlinesConfig

__all__ = [
    "DEFAULT_DEADLINES",
    "MARGIN_S",
    "PENDING_CALLS",
    "CallTarget",
    "Deadline",
    "Deadlines",
    "PendingCall",
    "PendingCalls",
    "Progress",
    "format_report_hint",
    "format_targets",
    "track_call",
]


UNLIMITED_S = 30 * 86_400.0


class CallTarget(NamedTuple):
    """Who is waited for: a kind of process, and which of them. Its process tells where it is (`processes.py`)."""

    kind: str
    number: int | None = None

    def __str__(self) -> str:
        return self.kind if self.number is None else f"{self.kind} {self.number}"


def format_targets(targets: Sequence[CallTarget]) -> str:
    """Owners of one kind in few words.

    >>> together([Owner("train worker", number) for number in (0, 1, 2, 5)])
    'train workers 0-2, 5'
    """
    kind, numbers = targets[0].kind, sorted({target.number for target in targets if target.number is not None})
    if len(numbers) < 2:
        return str(targets[0])
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return f"{kind}s " + ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


class Deadline(NamedTuple):
    """How long something may take, and the setting that says so, for messages."""

    seconds: float
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.setting}={self.seconds:g}" if self.setting else f"{self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The deadlines of a run, one for each kind of wait: `trainer.deadlines`."""

    devices: Deadline
    start: Deadline
    generation: Deadline
    train: Deadline
    weights: Deadline
    checkpoint: Deadline
    reply: Deadline
    close: Deadline

    @property
    def longest_s(self) -> float:
        return max(getattr(self, name).seconds for name in DeadlinesConfig.model_fields)

    @classmethod
    def read(cls, section: DeadlinesConfig) -> Deadlines:
        return cls(**{name: Deadline(seconds, f"trainer.deadlines.{name}") for name, seconds in section})

    @classmethod
    def unlimited(cls) -> Deadlines:
        """For a run in one process: who sits at a breakpoint has all the time there is."""
        return cls(**{name: Deadline(UNLIMITED_S) for name in DeadlinesConfig.model_fields})


DEFAULT_DEADLINES = Deadlines.read(DeadlinesConfig())

MARGIN_S = 60.0
"""Whoever else has a limit for the same waits so much longer: the wait that has a name ends first, and is reported."""


@dataclass(slots=True)
class Progress:
    """When somebody last finished anything: whoever waits for him may wait a whole deadline from then on."""

    at: float = float("-inf")


@dataclass(eq=False, slots=True)
class PendingCall:
    """One wait that is going on."""

    action: str
    target: CallTarget
    deadline: Deadline
    clock: Callable[[], float]
    progress: Progress = field(default_factory=Progress)
    peers: int = 0  # how many are asked the same thing together, as the ranks of a group are
    started_at: float = 0.0
    report: str = ""
    """Where the watchdog wrote what it saw, once it has."""

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began, or since its owner last finished anything."""
        return self.clock() - max(self.started_at, self.progress.at)

    @property
    def remaining_s(self) -> float:
        return self.deadline.seconds - self.elapsed_s


class PendingCalls:
    """The open waits of one process. Any thread may open and close them; the watchdog's looks at them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._open: dict[int, PendingCall] = {}
        self.clock = clock
        self.is_watched = False

    @contextmanager
    def track_call(
        self, action: str, *, target: CallTarget, deadline: Deadline, progress: Progress | None = None, peers: int = 0
    ) -> Iterator[PendingCall]:
        """Register a call for as long as the block runs. The caller enforces the deadline itself.

        >>> target = CallTarget("rollout engine", 0)
        >>> with track_call("load weights", target=target, deadline=deadlines.weights) as call:
        ...     await asyncio.wait([request], timeout=call.remaining_s)
        """
        wait = PendingCall(action, target, deadline, self.clock, progress or Progress(), peers)
        self._open[id(wait)] = wait
        try:
            yield wait
        finally:
            del self._open[id(wait)]

    def active(self) -> list[PendingCall]:
        return sorted(self._open.copy().values(), key=lambda wait: wait.started_at)

    async def format_report_hint(self, wait: PendingCall, *, patience_s: float = 25.0) -> str:
        """What to add to the message of a wait that is over its deadline: where the watchdog's report is."""
        until = time.monotonic() + patience_s
        while self.is_watched and not wait.report and time.monotonic() < until:
            await asyncio.sleep(0.1)
        return f" Pending calls and stack traces: {wait.report}" if wait.report else ""


PENDING_CALLS = PendingCalls()
"""Those of this process."""

track_call, format_report_hint = PENDING_CALLS.track_call, PENDING_CALLS.format_report_hint
