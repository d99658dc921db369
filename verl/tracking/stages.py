"""Stages of a run, such as "generating", and how far they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from verl.redaction import redact


@dataclass(frozen=True, slots=True)
class Progress:
    """How many of the things that a stage waits for are finished, such as 12 of 64 responses."""

    finished: int = 0
    total: int = 0
    unit: str = "responses"
    left_s: float | None = None

    @property
    def share(self) -> float:
        return self.finished / self.total if self.total else 0.0

    def __str__(self) -> str:
        if not self.finished:
            return f"{self.total:,} {self.unit}" if self.total else ""
        left = "" if self.left_s is None else f", about {duration(self.left_s)} left"
        return f"{self.finished:,} of {self.total:,} {self.unit}{left}"


ReadProgress = Callable[[], Progress | str]


@dataclass(frozen=True, eq=False, slots=True)
class Stage:
    """What a run is doing, since when, and how far it is."""

    name: str
    progress: ReadProgress = str
    start: float = field(default_factory=time.monotonic)

    def elapsed(self) -> str:
        return duration(time.monotonic() - self.start)

    def read_progress(self) -> Progress | str:
        """Return how far the stage is; nothing if its function fails, because a display must not end a run."""
        try:
            progress = self.progress()
            return redact(progress) if isinstance(progress, str) else progress
        except Exception:  # noqa: BLE001
            return ""


def duration(seconds: float) -> str:
    """Format with at most two units: `45s`, `3m20s`, `1h05m`, `2d03h`."""
    total = round(seconds)
    for name, unit, minor_name, minor in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if total >= unit:
            return f"{total // unit}{name}{total % unit // minor:02d}{minor_name}"
    return f"{total}s"
