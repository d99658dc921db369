"""A group of episodes, from its start to its training."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from verl.types import SampleHandle, one_per_episode


@dataclass(eq=False, slots=True)
class Group:
    """The episodes of one prompt. `task` ends when the other fields have their final values, or raises."""

    position: int  # index in the stream of prompts
    version: int  # version of the weights when the group started
    task: asyncio.Task[None] = field(init=False)
    samples: list[SampleHandle] = field(default_factory=list)
    has_signal: bool = True
    is_dropped: bool = False  # the prompt is too long
    unverified: frozenset[int] = frozenset()  # engines whose samples are discarded

    @property
    def episodes(self) -> list[SampleHandle]:
        """One sample of each episode."""
        return one_per_episode(self.samples)

    def reject(self) -> None:
        """Mark the group as one without signal, and release its samples from the object store."""
        self.has_signal = False
        self.samples = [replace(sample, ref=None) for sample in self.samples]

    def discard_unverified(self) -> int:
        """Remove the episodes that unverified engines generated; return their number."""
        before = len(self.episodes)
        self.samples = [sample for sample in self.samples if not self.unverified & sample.engines]
        return before - len(self.episodes)
