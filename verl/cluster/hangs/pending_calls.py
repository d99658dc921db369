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
    "DEFAULTS",
    "MARGIN_S",
    "WAITS",
    "Deadline",
    "Deadlines",
    "Owner",
    "Progress",
    "Wait",
    "Waits",
    "reported",
    "together",
    "waiting",
]


A_MONTH_S = 30 * 86_400.0


class Owner(NamedTuple):
    """Who is waited for: a kind of process, and which of them. Its process tells where it is (`processes.py`)."""

    kind: str
    number: int | None = None

    def __str__(self) -> str:
        return self.kind if self.number is None else f"{self.kind} {self.number}"


def together(owners: Sequence[Owner]) -> str:
    """Owners of one kind in few words.

    >>> together([Owner("train worker", number) for number in (0, 1, 2, 5)])
    'train workers 0-2, 5'
    """
    kind, numbers = owners[0].kind, sorted({owner.number for owner in owners if owner.number is not None})
    if len(numbers) < 2:
        return str(owners[0])
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
    def unhurried(cls) -> Deadlines:
        """For a run in one process: who sits at a breakpoint has all the time there is."""
        return cls(**{name: Deadline(A_MONTH_S) for name in DeadlinesConfig.model_fields})


DEFAULTS = Deadlines.read(DeadlinesConfig())

MARGIN_S = 60.0
"""Whoever else has a limit for the same waits so much longer: the wait that has a name ends first, and is reported."""


@dataclass(slots=True)
class Progress:
    """When somebody last finished anything: whoever waits for him may wait a whole deadline from then on."""

    at: float = float("-inf")


@dataclass(eq=False, slots=True)
class Wait:
    """One wait that is going on."""

    what: str
    of: Owner
    deadline: Deadline
    clock: Callable[[], float]
    progress: Progress = field(default_factory=Progress)
    peers: int = 0  # how many are asked the same thing together, as the ranks of a group are
    begun: float = 0.0
    report: str = ""
    """Where the watchdog wrote what it saw, once it has."""

    def __post_init__(self) -> None:
        self.begun = self.clock()

    @property
    def age(self) -> float:
        """Seconds since it began, or since its owner last finished anything."""
        return self.clock() - max(self.begun, self.progress.at)

    @property
    def left(self) -> float:
        return self.deadline.seconds - self.age


class Waits:
    """The open waits of one process. Any thread may open and close them; the watchdog's looks at them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._open: dict[int, Wait] = {}
        self.clock = clock
        self.is_watched = False

    @contextmanager
    def waiting(
        self, what: str, *, of: Owner, deadline: Deadline, progress: Progress | None = None, peers: int = 0
    ) -> Iterator[Wait]:
        """Inside of it, this process waits until `of` has done `what`. It names the wait; who waits keeps its deadline.

        >>> with waiting("load the weights", of=Owner("rollout engine", 0), deadline=deadlines.weights) as wait:
        ...     await asyncio.wait([request], timeout=wait.left)
        """
        wait = Wait(what, of, deadline, self.clock, progress or Progress(), peers)
        self._open[id(wait)] = wait
        try:
            yield wait
        finally:
            del self._open[id(wait)]

    def open(self) -> list[Wait]:
        return sorted(self._open.copy().values(), key=lambda wait: wait.begun)

    async def reported(self, wait: Wait, *, patience_s: float = 25.0) -> str:
        """What to add to the message of a wait that is over its deadline: where the watchdog's report is."""
        until = time.monotonic() + patience_s
        while self.is_watched and not wait.report and time.monotonic() < until:
            await asyncio.sleep(0.1)
        return f"; who waited for whom, and the stacks: {wait.report}" if wait.report else ""


WAITS = Waits()
"""Those of this process."""

waiting, reported = WAITS.waiting, WAITS.reported
