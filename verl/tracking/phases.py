"""When the phases of a step began and ended, in the process that measures them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PhaseRow = list[str | float]
"""Worker, phase, start and end in Unix time: a row of `phases.jsonl`."""
PHASES = "phases"
"""The rows of a train rank, among the metrics that it returns."""


class PhaseTimes:
    """The phases of a worker since the last `take`; they may overlap."""

    def __init__(self, worker: str = "controller") -> None:
        self._worker, self.rows = worker, list[PhaseRow]()

    @contextmanager
    def measure(self, phase: str, *, continues: bool = False) -> Iterator[None]:
        """Measure a phase; one that `continues` the row before, as each of many buckets does, becomes part of it."""
        start = time.time()
        try:
            yield
        finally:
            end = round(time.time(), 3)
            if continues and self.rows and self.rows[-1][1] == phase:
                self.rows[-1][3] = end
            else:
                self.rows.append([self._worker, phase, round(start, 3), end])

    def take(self) -> list[PhaseRow]:
        """Return the rows since the last call."""
        rows, self.rows = self.rows, []
        return rows
