"""The metrics of a run so far, as rules read them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Series:
    """The finite values of a metric, oldest first, and the steps that reported them."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


class History:
    """The metrics of a run: all of the latest report, and of earlier ones those that rules look at.

    >>> run = History(["reward/mean"])
    >>> for step in range(1, 4):
    ...     run.record({"reward/mean": step / 10}, step)
    >>> run.step, run.get("reward/mean"), run.values("reward/mean", last=2)
    (3, 0.3, [0.2, 0.3])
    """

    def __init__(self, names: Collection[str]) -> None:
        """Keep earlier values of the metrics `names`, and the means of validations."""
        self._names = frozenset(names)
        self._series: dict[str, Series] = {}
        self.step = 0
        self.now: Mapping[str, float] = {}

    def record(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the metrics of a step or of a validation."""
        self.step, self.now = step, metrics
        for name, value in metrics.items():
            if (name in self._names or _is_validation(name)) and math.isfinite(value):
                series = self._series.setdefault(name, Series())
                series.steps.append(step)
                series.values.append(value)

    def get(self, name: str, default: float = 0.0) -> float:
        """Return a metric of the latest report."""
        return self.now.get(name, default)

    def values(self, name: str, last: int | None = None) -> Sequence[float]:
        """Return the finite values of a metric, oldest first: all, or the `last` ones, of which there may be fewer."""
        values = self.get_series(name).values
        return values if last is None else values[-last:]

    def get_series(self, name: str) -> Series:
        """Return the finite values of a metric with their steps."""
        return self._series.get(name, Series())

    def list_validations(self) -> list[str]:
        """Return the names of the means that the latest report has of a validation."""
        return [name for name in self.now if _is_validation(name)]


def _is_validation(name: str) -> bool:
    return name.startswith("val/") and "/mean@" in name
