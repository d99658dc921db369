"""Overlong reward shaping (DAPO): a response close to the length limit loses some of its score."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """The penalty for training responses: the last `buffer` of `max_length` tokens cost up to `factor`."""

    buffer: int
    factor: float
    max_length: int

    def compute(self, length: int) -> float:
        return compute_overlong_penalty(length, self.max_length, self.buffer, self.factor)


def compute_overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """Return 0 up to `max_length - buffer` tokens, then linearly less, down to `-factor` from `max_length` on.

    >>> [compute_overlong_penalty(length, max_length=100, buffer=20, factor=1.0) for length in (80, 85, 100, 120)]
    [0.0, -0.25, -1.0, -1.0]
    """
    over = min(length, max_length) - (max_length - buffer)
    return -factor * (over / buffer) if over > 0 else 0.0
