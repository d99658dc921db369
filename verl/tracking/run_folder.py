"""Reading the folder of a run (`trainer.default_local_dir`), also while the run writes to it or after a crash."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from verl.errors import DataError, VerlError

RECORDS = ("metrics.jsonl", "starts.jsonl")
"""A folder with one of these files belongs to a run."""
_SAMPLE_FILE = re.compile(r"(train|val)_(\d+)\.parquet")
_MIN_SILENCE_S, _SILENT_STEPS = 600.0, 5.0
"""A run counts as stopped after this time without a record, or after this many times the duration of a step."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """All metrics of a step; `time` is that of the last record."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunWarning:
    """Advice that the console printed, and the name of its rule; "" if it is not from a rule."""

    step: int
    time: float
    text: str
    rule: str = ""

    def describe(self) -> str:
        """Return the text, and how to look up the rule."""
        return f"{self.text} (verl explain {self.rule})" if self.rule else self.text


@dataclass(frozen=True, slots=True)
class Setting:
    """The text of a value in YAML, and where the value came from: "default", "command line", ..."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class Start:
    """A start or resume of the run, with the settings that differ from their defaults.

    `environment` maps titles to rows, as `verl env --json` prints them.
    """

    step: int
    time: float
    total_steps: int | None
    command: str
    settings: Sequence[Setting]
    environment: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Phase:
    """What a worker did, between two points in Unix time."""

    worker: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class SampleFile:
    """The recorded samples of a step; `split` is "train" or "val"."""

    path: Path
    split: str
    step: int


@dataclass(frozen=True, slots=True)
class RunState:
    """How far a run is, at the time of its last record.

    `name` is "running", "finished", or "stopped". A run that wrote a record recently counts as running. Only a run that
    has done `total_steps`, if they are known, counts as finished.
    """

    name: str
    step: int
    total_steps: int | None
    time: float | None


class RunFolder:
    """The files of a run. Each method reads its file again; a missing file is like an empty one.

    Lines that are not JSON objects with a step are skipped: a crash may truncate the last one.

    Raises:
        VerlError: The folder does not belong to a run.
    """

    def __init__(self, path: Path) -> None:
        if not is_run_folder(path):
            raise VerlError(
                f"{path}: {'is not the folder of a run' if path.is_dir() else 'no such folder'}. Give the folder that "
                f"trainer.default_local_dir names, with {' or '.join(RECORDS)}"
            )
        self.path = path

    @property
    def name(self) -> str:
        """The name of the folder, with the one above: usually the project and the experiment."""
        return "/".join(self.path.resolve().parts[-2:]).lstrip("/")

    def read_metrics(self) -> list[StepMetrics]:
        """Return the metrics by step. A step has several records if it validated or saved."""
        merged: dict[int, StepMetrics] = {}
        for record in self._read_records("metrics"):
            values = {name: number for name, value in record.items() if (number := _to_number(value)) is not None}
            step, time = record["step"], values.pop("time", 0.0)
            del values["step"]
            if (known := merged.get(step)) is not None:
                values, time = {**known.values, **values}, max(known.time, time)
            merged[step] = StepMetrics(step, time, values)
        return [merged[step] for step in sorted(merged)]

    def read_warnings(self) -> list[RunWarning]:
        return [
            RunWarning(record["step"], _get_time(record), str(record["text"]), str(record.get("rule", "")))
            for record in self._read_records("warnings")
            if "text" in record
        ]

    def read_starts(self) -> list[Start]:
        return [
            Start(
                record["step"],
                _get_time(record),
                steps if isinstance(steps := record.get("total_steps"), int) else None,
                str(record.get("command", "")),
                [
                    Setting(key, _write_flow(change.get("value")), str(change.get("origin", "")))
                    for key, change in _get_mapping(record, "settings").items()
                    if isinstance(change, dict)
                ],
                {
                    title: {name: str(value) for name, value in rows.items()}
                    for title, rows in _get_mapping(record, "environment").items()
                    if isinstance(rows, dict)
                },
            )
            for record in self._read_records("starts")
        ]

    def read_settings(self) -> list[Setting]:
        """Return all settings in the order of settings.yaml; none if the file cannot be parsed."""
        try:
            text = (self.path / "settings.yaml").read_text(encoding="utf-8")
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return []
        return list(_list_settings(root, text.splitlines())) if isinstance(root, yaml.MappingNode) else []

    def read_phases(self) -> dict[int, list[Phase]]:
        """Return the phases of the workers by step."""
        phases: dict[int, list[Phase]] = {}
        for record in self._read_records("phases"):
            rows = record.get("phases")
            phases[record["step"]] = [
                Phase(str(row[0]), str(row[1]), float(row[2]), float(row[3]))
                for row in (rows if isinstance(rows, list) else ())
                if _is_phase(row)
            ]
        return phases

    def list_samples(self) -> list[SampleFile]:
        """Return the files of recorded samples by step, training before validation."""
        found = (
            SampleFile(path, match[1], int(match[2]))
            for path in (self.path / "samples").glob("*.parquet")
            if (match := _SAMPLE_FILE.fullmatch(path.name))
        )
        return sorted(found, key=lambda file: (file.step, file.split))

    def read_samples(self, file: SampleFile, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a file, with those of `columns` that it has (None: all).

        Raises:
            DataError: The file is damaged, or was removed in the meantime.
        """
        try:
            with pq.ParquetFile(file.path) as source:
                known = source.schema_arrow.names
                return source.read(known if columns is None else [name for name in columns if name in known])
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file.path}: cannot be read: {error}") from error

    def read_state(self, now: float, metrics: Sequence[StepMetrics] | None = None) -> RunState:
        """Return how far the run is at a Unix time; `metrics` are read if they are not given."""
        metrics = self.read_metrics() if metrics is None else metrics
        starts = self.read_starts()
        times = [each.time for each in metrics] + [start.time for start in starts]
        step = max((each.step for each in metrics), default=0)
        total = starts[-1].total_steps if starts else None
        last = max(times, default=0.0)
        durations = [seconds for each in metrics[-20:] if (seconds := each.values.get("timing_s/step"))]
        patience = max(_MIN_SILENCE_S, _SILENT_STEPS * statistics.median(durations or [0.0]))
        name = "finished" if total and step >= total else "running" if now - last < patience else "stopped"
        return RunState(name, step, total, last or None)

    def _read_records(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the records of NAME.jsonl that have a step."""
        try:
            lines = (self.path / f"{name}.jsonl").read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def is_run_folder(path: Path) -> bool:
    return any((path / name).is_file() for name in RECORDS)


def _to_number(value: Any) -> float | None:
    """Return a metric as a number. NaN and infinities are written as strings."""
    if isinstance(value, str):
        return float(value) if value in ("NaN", "Infinity", "-Infinity") else None
    return float(value) if isinstance(value, int | float) else None


def _get_time(record: Mapping[str, Any]) -> float:
    time = _to_number(record.get("time"))
    return time if time is not None and math.isfinite(time) else 0.0


def _get_mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _is_phase(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 4 and all(isinstance(each, int | float) for each in row[2:])


def _write_flow(value: Any) -> str:
    """Write a value as it stands in settings.yaml."""
    if isinstance(value, str):
        return value
    return (
        yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False).removesuffix("\n...\n").strip()
    )


def _list_settings(node: yaml.MappingNode, lines: Sequence[str], above: str = "") -> Iterator[Setting]:
    """Yield the values below a section. Lists and dictionaries in one line are values."""
    for key, value in node.value:
        name = f"{above}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from _list_settings(value, lines, f"{name}.")
        else:
            yield Setting(name, _slice(lines, value), _get_comment(lines, value))


def _slice(lines: Sequence[str], node: yaml.Node) -> str:
    """Return the text of a value as it stands in the file; block lists over several lines in one."""
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    start, end = node.start_mark, node.end_mark
    if start.line == end.line:
        return lines[start.line][start.column : end.column]
    return " ".join(line.strip() for line in lines[start.line : end.line])


def _get_comment(lines: Sequence[str], node: yaml.Node) -> str:
    mark = node.end_mark  # of a block list: the beginning of the next line
    return lines[mark.line][mark.column :].lstrip(" #") if mark.line < len(lines) and mark.column else ""


def merge_names(metrics: Iterable[StepMetrics]) -> list[str]:
    """Return the names of all metrics, in the order of their first record."""
    return list(dict.fromkeys(name for each in metrics for name in each.values))
