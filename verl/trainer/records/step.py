"""The files that a step writes to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from verl.tracking.buffered_sink import BufferedSink
from verl.trainer.records.replay import StepRecorder
from verl.trainer.records.samples import SampleRecorder


@dataclass(slots=True)
class PhaseTimes:
    """When the phases of a step began and ended, in seconds of Unix time; they may overlap."""

    spans: list[list[str | float]] = field(default_factory=list)

    @contextmanager
    def measure(self, phase: str, worker: str = "controller") -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self.spans.append([worker, phase, round(start, 3), round(time.time(), 3)])

    def take(self) -> list[list[str | float]]:
        """Return the phases since the last call."""
        spans, self.spans = self.spans, []
        return spans


@dataclass(frozen=True, slots=True)
class StepRecords:
    """The files of a run that grow with every step.

    Args:
        trained: `trained.jsonl`, the positions in the data that were trained on.
        phases: `phases.jsonl`, when each phase began and ended.
        samples: `samples/`, responses with scores and the numbers of every token.
        replay: `replay/`, steps that can be run again; None: none.
    """

    trained: BufferedSink
    phases: BufferedSink
    samples: SampleRecorder
    replay: StepRecorder | None = None
