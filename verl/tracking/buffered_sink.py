"""A metric logger that fails without ending the run: its records are kept, and written when it works again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from verl.redaction import redact
from verl.tracking.console import Console
from verl.tracking.sink import Sink, Table, TableSink

MAX_RECORDS = 10_000
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 300.0


class BufferedSink:
    """Passes records to a metric logger, and keeps up to `MAX_RECORDS` of those that fail.

    Failed records are retried with later ones, after a pause that doubles: a service that does not respond may take
    long to fail. An outage is reported once, with a fix, and so is its end. `open_sink` is retried after an `OSError`.
    """

    def __init__(
        self,
        open_sink: Callable[[], Sink],
        name: str,
        fix: str,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open, self._name, self._fix, self._console, self._clock = open_sink, name, fix, console, clock
        self._sink: Sink | None = None
        self._records: deque[tuple[dict[str, Any] | Table, int]] = deque()
        self._failures = self._dropped = 0
        self._retry_at = 0.0
        try:
            self._sink = open_sink()
        except OSError as error:
            self._report(error)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._add(dict(metrics), step)

    def log_table(self, table: Table, step: int) -> None:
        """Pass a table to the logger, unless it shows none."""
        self._add(table, step)

    def _add(self, record: dict[str, Any] | Table, step: int) -> None:
        self._records.append((record, step))
        if len(self._records) > MAX_RECORDS:
            self._records.popleft()
            self._dropped += 1
        if not self._failures or self._clock() >= self._retry_at:
            self._flush()

    def close(self) -> None:
        """Write what is left, if possible; report what is lost."""
        self._flush()
        if lost := len(self._records) + self._dropped:
            self._console.advice(f"{self._name}: {lost:,} records were lost, because it did not work until the end")
        try:
            if self._sink is not None:
                self._sink.close()
        except Exception as error:  # noqa: BLE001 - must not change how the run ends
            self._console.advice(redact(f"{self._name}: was not closed properly: {error!r}"))

    def _flush(self) -> None:
        try:
            if self._sink is None:
                self._sink = self._open()
            while self._records:
                record, step = self._records[0]
                if not isinstance(record, Table):
                    self._sink.log(record, step)
                elif isinstance(self._sink, TableSink):
                    self._sink.log_table(record, step)
                self._records.popleft()
        except Exception as error:  # noqa: BLE001 - third-party code; metrics are not worth the run
            return self._report(error)
        if self._failures:
            dropped = f"; {self._dropped:,} records were dropped" if self._dropped else ""
            self._console.note(f"{self._name}: works again, and has the records of the time without it{dropped}")
            self._failures = self._dropped = 0

    def _report(self, error: Exception) -> None:
        self._retry_at = self._clock() + min(FIRST_PAUSE_S * 2**self._failures, MAX_PAUSE_S)
        self._failures += 1
        if self._failures == 1:
            self._console.advice(
                redact(
                    f"{self._name}: cannot be written: {str(error) or repr(error)}. Training continues, and up to "
                    f"{MAX_RECORDS:,} records are kept until it works again. {self._fix}"
                )
            )
