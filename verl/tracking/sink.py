"""The interface of metric loggers, and the description of a run that they get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with the same columns, such as the responses of a validation."""

    name: str
    rows: Sequence[Mapping[str, Any]]


class Sink(Protocol):
    """A metric logger. Validation metrics of a step may come in a separate call."""

    def log(self, metrics: Mapping[str, float], step: int, /) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class TableSink(Sink, Protocol):
    """A metric logger that also shows tables."""

    def log_table(self, table: Table, step: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class FunctionSink:
    """A metric logger that is two functions."""

    log: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


@dataclass(frozen=True, slots=True)
class FunctionTableSink(FunctionSink):
    """A metric logger that is three functions."""

    log_table: Callable[[Table, int], None]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Description of a run for metric loggers.

    `resumed_step` is the step of the checkpoint that the run resumes from. `wandb_proxy` is for wandb only: a proxy in
    the environment would also affect judges and tools.
    """

    folder: Path
    project: str = "verl"
    name: str = "default"
    total_steps: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    resumed_step: int | None = None
    wandb_proxy: str | None = None
