"""What a stage gets and what it returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from verl.config.rollout_engines import DEFAULT_ENGINE
from verl.errors import VerlError


class State(StrEnum):
    """How a stage ended."""

    OK = "ok"
    SKIPPED = "skipped"
    FAILED = "failed"


class CheckFailedError(VerlError):
    """A check of this machine has failed."""


class StageSkipped(VerlError):  # noqa: N818 - not an error
    """A stage that this machine has no devices for; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Context:
    """What is checked.

    Attributes:
        device: "cuda" or "cpu".
        gpus: The accelerators of this machine; 0 on the CPU.
        folder: For the files of all stages.
        model: A Hugging Face model folder or name; None: a tiny model with random weights.
        engine: The rollout engine.
        steps: GRPO steps of a stage that has to learn.
    """

    device: str
    gpus: int
    folder: Path
    model: str | None = None
    engine: str = DEFAULT_ENGINE
    steps: int = 20

    def get_model(self) -> str:
        """Return the path of the model; the tiny one is made at the first call."""
        if self.model is not None:
            return self.model
        from verl.demo.assets import make_assets
        from verl.demo.folder import Assets

        assets = Assets(self.folder / "tiny")
        return str((assets if assets.test.exists() else make_assets(assets.folder)).model)

    def require_gpus(self, count: int) -> None:
        """Skip the stage unless there are as many accelerators."""
        if self.gpus < count:
            there = f"this machine has {self.gpus}" if self.device == "cuda" else "this is a check of the CPU"
            raise StageSkipped(f"needs {count} GPU{'s' * (count > 1)}, {there}")


@dataclass(slots=True)
class Checks:
    """What a stage has checked: a stage without any check is not ok."""

    count: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def require(self, condition: bool, problem: str) -> None:
        """Count a check; raise with `problem` if it fails."""
        self.count += 1
        if not condition:
            raise CheckFailedError(problem)

    def at_most(self, name: str, value: float, limit: float, problem: str = "") -> None:
        """Check a figure, which is reported."""
        self.figures[name] = value
        self.require(
            math.isfinite(value) and value <= limit, f"{problem or name}: {value:.3g}; at most {limit:.3g} is allowed"
        )

    def at_least(self, name: str, value: float, limit: float, problem: str) -> None:
        """Check a figure, which is reported."""
        self.figures[name] = value
        self.require(
            math.isfinite(value) and value >= limit, f"{problem}: {value:.3g}; at least {limit:.3g} is expected"
        )

    def describe(self) -> str:
        """Return the figures and notes on one line."""
        parts = [f"{name} {_format(value)}" for name, value in self.figures.items()]
        checks = f"{self.count} check{'s' * (self.count != 1)}"
        return "; ".join(filter(None, [checks, ", ".join(parts), *self.notes]))


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return ", ".join(map(_format, value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True, slots=True)
class Result:
    """How a stage ended, and what it found.

    `text` is what the line says: figures, the reason, or what is wrong. `output` is the end of what a stage that has
    failed has printed.
    """

    stage: str
    state: State
    text: str
    seconds: float = 0.0
    checks: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    output: Sequence[str] = ()

    def __str__(self) -> str:
        first = self.text.strip().splitlines()[0] if self.text.strip() else ""
        return f"{self.state:<8}{self.stage:<15}{self.seconds:6.1f} s  {first}"
