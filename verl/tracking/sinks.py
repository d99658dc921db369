"""Where metrics go. One small protocol; the sink that does nothing stands in where others would write `if logger`."""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from verl.errors import ConfigError
from verl.redaction import redacted
from verl.tracking.console import Console

__all__ = [
    "ConsoleSink",
    "JsonlSink",
    "NullSink",
    "Run",
    "Sink",
    "Sinks",
    "TensorboardSink",
    "WandbSink",
    "open_sinks",
]


class Sink(Protocol):
    """Takes the metrics of a step. Validation metrics of a step may come in a call of their own."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Run:
    """What sinks are told of the run. `resumed_step` is the step of the checkpoint it continues from, if any.

    `wandb_proxy` is for wandb alone: a proxy in the environment would take judges and tools along.
    """

    folder: Path
    project: str = "verl"
    name: str = "default"
    total_steps: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    resumed_step: int | None = None
    wandb_proxy: str | None = None


class NullSink:
    """Keeps nothing."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def close(self) -> None:
        pass


class ConsoleSink:
    """One readable line per step, and one per validation."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if "reward/mean" in metrics or "train/loss" in metrics:
            self._console.step(metrics, step)
        if any(name.startswith("val/") for name in metrics):
            self._console.validation(metrics, step)

    def close(self) -> None:
        pass


class JsonlSink:
    """`metrics.jsonl` in the run's folder: one JSON object a line, with `step` and `time` (seconds since 1970).

    A resumed run drops the lines of the steps that it is about to repeat, and a last line cut short by a crash. A run
    that starts anew in a used folder moves the old file to `metrics-1.jsonl` (2, 3...), and loses nothing.
    Numbers that JSON cannot hold are written as the strings "NaN", "Infinity" and "-Infinity".
    """

    def __init__(self, folder: Path, resumed_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        if path.exists() and resumed_step is None:
            path.rename(next(p for n in range(1, 10**6) if not (p := folder / f"metrics-{n}.jsonl").exists()))
        elif path.exists():
            _drop_after(path, resumed_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        record = {"step": step, "time": round(time.time(), 3)} | {name: _jsonable(v) for name, v in metrics.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WandbSink:
    """Weights & Biases; a resumed run continues the curves of its folder's last run."""

    def __init__(self, run: Run) -> None:
        wandb = _import("wandb")
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=run.folder,
            config=dict(run.settings),
            resume="auto" if run.resumed_step is not None else None,
            settings=wandb.Settings(https_proxy=run.wandb_proxy) if run.wandb_proxy else None,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TensorboardSink:
    """Event files under `tensorboard/` in the run's folder."""

    def __init__(self, run: Run) -> None:
        _import("tensorboard")
        module = importlib.import_module("torch.utils.tensorboard")
        purge = None if run.resumed_step is None else run.resumed_step + 1
        self._writer = module.SummaryWriter(run.folder / "tensorboard", purge_step=purge)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Sinks:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for sink in self._sinks:
            sink.log(metrics, step)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


_OPENERS: dict[str, Callable[[Run, Console], Sink]] = {
    "console": lambda run, console: ConsoleSink(console),
    "jsonl": lambda run, console: JsonlSink(run.folder, run.resumed_step),
    "none": lambda run, console: NullSink(),
    "tensorboard": lambda run, console: TensorboardSink(run),
    "wandb": lambda run, console: WandbSink(run),
}


def open_sinks(names: Sequence[str], run: Run, console: Console | None = None) -> Sinks:
    """The sinks of `trainer.logger`, as one. None of them sees a secret.

    All unknown names are reported together, before any is opened.
    """
    problems = [
        f"trainer.logger: {name!r} is not a sink; known are {', '.join(sorted(_OPENERS))}"
        for name in names
        if name not in _OPENERS
    ]
    if problems:
        raise ConfigError(problems)
    console = console or Console(run.total_steps)
    run = replace(run, settings=redacted(run.settings))
    opened: list[Sink] = []
    try:
        for name in dict.fromkeys(names):
            opened.append(_OPENERS[name](run, console))
    except ConfigError:
        Sinks(opened).close()
        raise
    return Sinks(opened)


def _import(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ConfigError(
            [f"trainer.logger: {package!r} needs its package: pip install {package}, or leave it out"]
        ) from error


def _drop_after(path: Path, step: int | None) -> None:
    """Rewrites the file without what is later than `step` or unreadable; whole or not at all."""
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_kept(line, step)]
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)


def _is_kept(line: str, step: int | None) -> bool:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:  # the process died while it wrote this line
        return False
    return step is not None and record["step"] <= step


def _jsonable(value: float) -> float | str:
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
