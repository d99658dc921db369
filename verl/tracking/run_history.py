"""What a run has reported so far: recent steps and validations, warnings, and the time that it still needs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

KEPT = 64  # steps; more bars than a sparkline has
_RECENT = 20  # steps whose times predict the next ones


@dataclass(frozen=True, slots=True)
class Report:
    """The metrics of a step or of a validation, and when they were reported (Unix seconds)."""

    step: int
    time: float
    metrics: Mapping[str, float]


class RunHistory:
    """The recent past of a run.

    The run writes it while another thread draws it: attributes are replaced, never changed in place.
    """

    def __init__(self, total_steps: int | None = None, start: float | None = None) -> None:
        self.total_steps = total_steps
        self.start = time.time() if start is None else start
        self.steps: tuple[Report, ...] = ()
        self.validations: tuple[Report, ...] = ()
        self.running: tuple[int, float] | None = None  # the step in progress, and when it began
        self.warning_count, self.last_warning = 0, ""

    @property
    def last_step(self) -> int:
        """The step in progress, or else the last one that is done."""
        if self.running is not None:
            return self.running[0]
        return self.steps[-1].step if self.steps else 0

    @property
    def step_s(self) -> float | None:
        """The seconds of recent steps, on average."""
        times = [each.metrics["timing_s/step"] for each in self.steps if "timing_s/step" in each.metrics][-_RECENT:]
        return sum(times) / len(times) if times else None

    def record_step(self, metrics: Mapping[str, float], step: int, at: float | None = None) -> None:
        """Add the metrics of a step. A step that a resumed run repeats replaces the earlier one and those after it."""
        self.steps = _append(self.steps, Report(step, time.time() if at is None else at, metrics))

    def record_validation(self, metrics: Mapping[str, float], step: int, at: float | None = None) -> None:
        self.validations = _append(self.validations, Report(step, time.time() if at is None else at, metrics))

    def record_warning(self, text: str) -> None:
        self.warning_count, self.last_warning = self.warning_count + 1, text

    def remaining_s(self) -> float | None:
        """Return the seconds from the end of the last step to the end of the run; None if unknown."""
        if self.total_steps is None or self.step_s is None:
            return None
        return max(0, self.total_steps - self.steps[-1].step) * self.step_s

    def eta_s(self) -> float | None:
        """Return the seconds from now to the end of the run; None if unknown."""
        remaining = self.remaining_s()
        return None if remaining is None else max(0.0, self.steps[-1].time + remaining - time.time())


def _append(reports: tuple[Report, ...], new: Report) -> tuple[Report, ...]:
    return (*(each for each in reports if each.step < new.step), new)[-KEPT:]
