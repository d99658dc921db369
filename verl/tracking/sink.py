"""The interface of metric loggers, and the description of a run that they get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """A metric logger. Validation metrics of a step may come in a separate call."""

    def log(self, metrics: Mapping[str, float], step: int, /) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FunctionSink:
    """A metric logger that is two functions."""

    log: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


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
