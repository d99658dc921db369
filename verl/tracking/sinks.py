"""Metric loggers, which `trainer.logger` names: console, JSON lines, TensorBoard, and the services of `services`."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.private_files import make_folder
from verl.redaction import redact_settings
from verl.tracking.buffered_sink import BufferedSink
from verl.tracking.console import Console
from verl.tracking.services import open_mlflow, open_swanlab, open_trackio, open_wandb
from verl.tracking.sink import FunctionSink, RunInfo, Sink, Table, TableSink

KEEP_ALL = sys.maxsize
"""The `resumed_step` with which no line of a record is dropped."""


class ConsoleSink:
    """Logs one line per step and per validation to the console."""

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
    """Writes records to a file in the run's folder: one JSON object per line, with `step` and `time` (Unix time).

    A resumed run drops the lines of the steps that it will repeat, and a last line that a crash truncated. A new run in
    a used folder renames the old file, such as `metrics.jsonl` to `metrics-1.jsonl` (2, 3...). Numbers that JSON cannot
    represent are written as the strings "NaN", "Infinity" and "-Infinity".
    """

    def __init__(self, folder: Path, resumed_step: int | None = None, name: str = "metrics") -> None:
        make_folder(folder)
        path = folder / f"{name}.jsonl"
        if path.exists() and resumed_step is None:
            path.rename(next(p for n in range(1, 10**6) if not (p := folder / f"{name}-{n}.jsonl").exists()))
        elif path.exists():
            _truncate_after(path, resumed_step)
        self._path, self._file = path, path.open("ab", buffering=0)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        record = {"step": step, "time": round(time.time(), 3)} | {name: _jsonable(v) for name, v in metrics.items()}
        rest, end = (
            memoryview(f"{json.dumps(record, allow_nan=False)}\n".encode()),
            os.fstat(self._file.fileno()).st_size,
        )
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(end)  # no part of a line stays
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        self._file.close()


def open_tensorboard(run: RunInfo) -> Sink:
    """Write TensorBoard event files to `tensorboard/` in the run's folder."""
    from torch.utils.tensorboard import SummaryWriter

    purge = None if run.resumed_step is None else run.resumed_step + 1
    writer = SummaryWriter(run.folder / "tensorboard", purge_step=purge)

    def log(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return FunctionSink(log, writer.close)


class Sinks:
    """Several metric loggers as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for sink in self._sinks:
            sink.log(metrics, step)

    def log_table(self, table: Table, step: int) -> None:
        """Pass a table to the loggers that show tables."""
        for sink in self._sinks:
            if isinstance(sink, TableSink):
                sink.log_table(table, step)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


_OPENERS: dict[str, Callable[[RunInfo], Sink]] = {
    "jsonl": lambda run: JsonlSink(run.folder, run.resumed_step),
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "mlflow": open_mlflow,
    "trackio": open_trackio,
    "swanlab": open_swanlab,
}
_FIXES = {
    "wandb": "Check the network and https://status.wandb.com, or set WANDB_MODE=offline and upload later.",
    "mlflow": "Check the server of MLFLOW_TRACKING_URI, and the network.",
    "trackio": "Check the disk of TRACKIO_DIR (~/.cache/huggingface/trackio), or with TRACKIO_SPACE_ID the network.",
    "swanlab": "Check the network and `swanlab login`, or set SWANLAB_MODE=local.",
}


def _open_sink(name: str, run: RunInfo, console: Console) -> Sink:
    if name == "console":
        return ConsoleSink(console)
    path = run.folder / {"jsonl": "metrics.jsonl"}.get(name, name)
    fix = _FIXES.get(name, f"Check that {path.parent} is writable, and free space on its disk (df -h {path.parent}).")
    return BufferedSink(lambda: _OPENERS[name](run), name if name in _FIXES else str(path), fix, console)


def open_sinks(names: Sequence[str], run: RunInfo, console: Console | None = None) -> Sinks:
    """Open the metric loggers of `trainer.logger`, with secrets redacted from the settings; `none` is not opened."""
    console = console or Console(run.total_steps)
    run = replace(run, settings=redact_settings(run.settings))
    return Sinks([_open_sink(name, run, console) for name in dict.fromkeys(names) if name != "none"])


def open_record(name: str, folder: Path, resumed_step: int | None, console: Console) -> BufferedSink:
    """Open NAME.jsonl in the run's folder, for records whose values may also be text, lists and dictionaries.

    With `resumed_step=KEEP_ALL`, a resumed run keeps all lines.
    """
    path, fix = (
        folder / f"{name}.jsonl",
        f"Check that {folder} is writable, and free space on its disk (df -h {folder}).",
    )
    return BufferedSink(lambda: JsonlSink(folder, resumed_step, name), str(path), fix, console)


def _truncate_after(path: Path, step: float | None) -> None:
    """Atomically rewrite the file without lines that are unreadable or later than `step`."""
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_kept(line, step)]
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)


def _is_kept(line: str, step: float | None) -> bool:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:  # the process died while it wrote this line
        return False
    return step is not None and record["step"] <= step


def _jsonable(value: Any) -> Any:
    if isinstance(value, str | list | dict | int):
        return value
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
