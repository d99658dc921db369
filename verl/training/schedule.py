"""The learning-rate schedule: a pure function of the step, so that a checkpoint holds one number."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """`lr` after a linear warmup of `warmup_steps`, then constant or decaying to `min_ratio * lr` at `total_steps`.

    >>> Schedule(lr=1.0, warmup_steps=4).at(0), Schedule(lr=1.0, kind="linear", total_steps=10).at(5)
    (0.25, 0.5)
    """

    lr: float
    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule: {self.kind!r} is not one of constant, linear, cosine")
        if self.kind != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(
                f"schedule={self.kind}: total_steps {self.total_steps} must be more than warmup_steps "
                f"{self.warmup_steps}; set the total number of optimizer steps, or use schedule=constant"
            )

    def at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.lr
        assert self.total_steps is not None
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        left = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.lr * (self.min_ratio + (1.0 - self.min_ratio) * left)
