"""Admission: how many groups of episodes may start."""

from __future__ import annotations

import math
import sys


class Admission:
    """Limits how far generation runs ahead of training.

    With the weights of version v in the engines, at most `batch * (v + 1 + run_ahead)` groups have started, counted
    from the first version of the run, and never more than `batch * steps`. `run_ahead` is in batches; with 0,
    generation and training take turns.

    A group without signal stops counting when it is rejected, so that another group may start at once. With
    `max_batches`, at most `batch * (max_batches + run_ahead)` groups that no step has seen exist at a time, those
    without signal included. A dropped prompt never counts.
    """

    def __init__(self, batch: int, *, run_ahead: float = 0, max_batches: int = 0, steps: int | None = None) -> None:
        self._batch, self._run_ahead = batch, run_ahead
        self._most = sys.maxsize if steps is None else batch * steps
        self._reach = math.floor(batch * (max_batches + run_ahead)) if max_batches else sys.maxsize
        self._first: int | None = None  # the first version of the run
        self._limit = 0  # groups that may have started
        self._started = 0

    def advance(self, version: int) -> None:
        """Allow what may start with `version` in the engines."""
        self._first = version if self._first is None else self._first
        self._limit = min(self._most, math.floor(self._batch * (version - self._first + 1 + self._run_ahead)))

    def may_start(self, unseen: int) -> bool:
        """Return whether another group may start now; `unseen` groups have started that no step has seen."""
        return self._started < self._limit and unseen < self._reach

    def record_started(self, groups: int = 1) -> None:
        self._started += groups

    def record_unusable(self) -> None:
        """Stop counting a group without signal, or one whose prompt is dropped."""
        self._started -= 1
