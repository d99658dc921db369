"""How long calls to other processes may take: `trainer.deadlines`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from verl.config.schema.trainer import DeadlinesConfig

UNLIMITED_S = 30 * 86_400.0

MARGIN_S = 60.0
"""Added to timeouts of others around the same call, so that the tracked call, which is reported, expires first."""


class Deadline(NamedTuple):
    """A duration and the setting that it comes from, for messages."""

    seconds: float
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.setting}={self.seconds:g}" if self.setting else f"{self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The deadlines of a run, one for each kind of call."""

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
    def from_config(cls, section: DeadlinesConfig) -> Deadlines:
        return cls(**{name: Deadline(seconds, f"trainer.deadlines.{name}") for name, seconds in section})

    @classmethod
    def unlimited(cls) -> Deadlines:
        """Return deadlines for a run in one process, where a debugger may stop everything."""
        return cls(**{name: Deadline(UNLIMITED_S) for name in DeadlinesConfig.model_fields})


DEFAULT_DEADLINES = Deadlines.from_config(DeadlinesConfig())
