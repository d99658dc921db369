"""Admission: which groups of episodes may start."""

from __future__ import annotations

import math
import sys


class Admission:
    """Limits how far generation runs ahead of training.

    With the weights of version v in the engines, at most `batch * (v + 1 + run_ahead)` groups have started, counted
    from the first version of the run. `run_ahead` is in batches; with 0, generation and training take turns.

    A group without signal stops counting when it is rejected, so that another group may start at once. With
    `max_batches`, no group starts that the steps that may use it cannot reach: at version v, none that is
    `batch * (max_batches + run_ahead)` or more after the first group of v's step. A dropped prompt never counts.
    """

    def __init__(self, batch: int, *, run_ahead: float = 0, max_batches: int = 0) -> None:
        self._batch, self._run_ahead, self._max_batches = batch, run_ahead, max_batches
        self._first: int | None = None  # the first version of the run
        self._limit = 0  # groups that may have started
        self._end = 0  # groups may start before this position of the stream
        self._started = 0

    def advance(self, version: int, position: int, dropped: int) -> None:
        """Allow what may start with `version` in the engines.

        Args:
            position: The first position that no step has used.
            dropped: The number of dropped prompts from there on.
        """
        self._first = version if self._first is None else self._first
        self._limit = math.floor(self._batch * (version - self._first + 1 + self._run_ahead))
        reach = math.floor(self._batch * (self._max_batches + self._run_ahead))
        self._end = position + reach + dropped if self._max_batches else sys.maxsize

    def may_start(self, position: int) -> bool:
        """Return whether the group at `position`, the next of the stream, may start now."""
        return self._started < self._limit and position < self._end

    def record_started(self, groups: int = 1) -> None:
        self._started += groups

    def record_rejected(self) -> None:
        """Stop counting a group without signal."""
        self._started -= 1

    def record_dropped(self) -> None:
        """Stop counting a group whose prompt was dropped; the end moves on by one position."""
        self._started -= 1
        self._end += 1
