"""Groups of episodes: one group from its start to its training, and all groups of one step."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from verl.types import SampleHandle


@dataclass(eq=False, slots=True)
class Group:
    """The episodes of one prompt. `task` ends when the other fields have their final values, or raises."""

    position: int  # in the stream of prompts
    version: int  # of the weights when the group started
    task: asyncio.Task[None] = field(init=False)
    samples: list[SampleHandle] = field(default_factory=list)
    has_signal: bool = True
    is_dropped: bool = False  # the prompt is too long
    unverified: frozenset[int] = frozenset()  # engines whose samples are discarded

    def reject(self) -> None:
        """Mark the group as one without signal, and release its samples from the object store."""
        self.has_signal = False
        self.samples = [replace(sample, ref=None) for sample in self.samples]

    def discard_unverified(self) -> int:
        """Remove samples that unverified engines generated; return their number."""
        kept = [sample for sample in self.samples if not self.unverified & sample.engines]
        count = len(self.samples) - len(kept)
        self.samples = kept
        return count


@dataclass(slots=True)
class Take:
    """The groups of one step: how many are wanted, and those that were selected so far, by what becomes of them."""

    count: int  # groups to train
    bound: int = sys.maxsize  # groups to look at, without dropped prompts
    selected: list[Group] = field(default_factory=list)  # all, in the order of the selection
    trained: list[Group] = field(default_factory=list)
    rejected: list[Group] = field(default_factory=list)  # without signal
    dropped: int = 0  # prompts
    discarded: int = 0  # samples

    @property
    def generated(self) -> int:
        """The number of groups that were looked at."""
        return len(self.trained) + len(self.rejected)

    @property
    def missing(self) -> int:
        """The number of groups to select next; 0 at the end."""
        return min(self.count - len(self.trained), self.bound - self.generated)

    def add(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.discarded += group.discard_unverified()
            self.selected.append(group)
            if group.is_dropped:
                self.dropped += 1
            else:
                (self.trained if group.has_signal else self.rejected).append(group)
