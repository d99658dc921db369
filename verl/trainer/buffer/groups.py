"""A group of episodes, from its start to its training."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from verl.types import SampleHandle, one_per_episode


@dataclass(eq=False, slots=True)
class Group:
    """The episodes of one prompt. Other fields have their final values when `task` has ended."""

    position: int  # index in the stream of prompts
    version: int  # version of the weights when the group started
    task: asyncio.Task[None] = field(init=False)
    samples: list[SampleHandle] = field(default_factory=list)
    is_usable: bool = False  # finished, and to be trained
    is_dropped: bool = False  # the prompt is too long
    unverified: frozenset[int] = frozenset()  # engines whose samples are discarded

    @property
    def episodes(self) -> list[SampleHandle]:
        """One sample of each episode."""
        return one_per_episode(self.samples)

    def finish(self, samples: list[SampleHandle] | None, *, has_signal: bool) -> None:
        """Set the result: samples, or None for a dropped prompt. Without signal they leave the object store."""
        self.is_dropped, self.is_usable = samples is None, samples is not None and has_signal
        self.samples = [each if has_signal else replace(each, ref=None) for each in samples or []]

    def discard_unverified(self) -> int:
        """Remove the episodes that unverified engines generated; return their number."""
        before = len(self.episodes)
        self.samples = [sample for sample in self.samples if not self.unverified & sample.engines]
        return before - len(self.episodes)
