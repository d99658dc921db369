"""Selection: when a step can take its groups, and which ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from verl.trainer.buffer.groups import Group


class Selection:
    """Decides which finished groups a step takes: those that started first, so that every group is trained in time.

    A group that started at version s has to be trained by the step of version s + `max_staleness`. A step may take
    its groups if the rest can still be trained in time at one batch per step: for each of the next versions d, at most
    batch * (d - version) of the rest have to be trained by the step of d. Otherwise it waits for those that have to be
    trained first. With a staleness of 0 it waits for all. Groups that will not be trained do not count.
    """

    def __init__(self, batch: int, max_staleness: int) -> None:
        self._batch, self._max_staleness = batch, max_staleness
        self._waiting = Counter[int]()  # groups to be trained, finished or not, by the version that they started at
        self._finished = Counter[int]()  # those of them that are finished

    @property
    def finished(self) -> int:
        """The number of groups that could be trained now."""
        return self._finished.total()

    def record_started(self, version: int) -> None:
        self._waiting[version] += 1

    def record_finished(self, version: int) -> None:
        self._finished[version] += 1

    def record_unusable(self, version: int) -> None:
        """Stop counting a group that will not be trained: one without signal, or whose prompt is dropped."""
        self._waiting[version] -= 1

    def can_take(self, count: int, version: int) -> bool:
        """Return whether the step of `version` may take `count` groups now."""
        if self.finished < count:
            return False
        rest = 0
        for started in sorted(+self._waiting):
            taken = min(self._finished[started], count)
            count -= taken
            rest += self._waiting[started] - taken
            if rest > self._batch * (started + self._max_staleness - version):
                return False
        return True

    def take(self, finished: Iterable[Group], count: int) -> list[Group]:
        """Return `count` of the finished groups, those that started first, in the order of the stream."""
        taken = sorted(finished, key=lambda group: (group.version, group.position))[:count]
        for group in taken:
            self._waiting[group.version] -= 1
            self._finished[group.version] -= 1
        return sorted(taken, key=lambda group: group.position)
