"""The output of `verl generate`: rows of data files with their responses, in Parquet files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.errors import DataError
from verl.private_files import make_folder
from verl.redaction import redact

if TYPE_CHECKING:
    from verl.data.dataset import PromptDataset

RESPONSE_COLUMNS = {
    "responses": pa.list_(pa.string()),
    "finish_reasons": pa.list_(pa.string()),
    "response_lengths": pa.list_(pa.int64()),
}
EPISODE_COLUMNS = {
    "conversations": pa.list_(pa.string()),  # as JSON
    "rewards": pa.list_(pa.float64()),  # those of an environment or agent
}


class PartFiles:
    """Finished parts in a folder next to the output: each is written atomically; at the end they become one file."""

    def __init__(self, output: Path, inputs: dict[str, Any]) -> None:
        self._output, self.folder = output, output.with_name(f"{output.name}.parts")
        record = self.folder / "made_with.json"
        text = redact(json.dumps(inputs, indent=2, sort_keys=True))
        if record.exists() and record.read_text(encoding="utf-8") != text:
            raise DataError(
                f"{self.folder}: contains parts of a run with other settings or files (see {record.name} there); "
                "remove the folder, or choose another --output"
            )
        make_folder(self.folder)
        record.write_text(text, encoding="utf-8")

    def has(self, start: int) -> bool:
        return self._path(start).exists()

    def write(self, start: int, rows: pa.Table) -> None:
        _write_atomically(rows, self._path(start).with_suffix(".tmp"), self._path(start))

    def finish(self) -> None:
        """Join the parts into the output, and remove them."""
        tables = [pq.read_table(path) for path in sorted(self.folder.glob("*.parquet"))]
        joined = pa.concat_tables(tables, promote_options="permissive")
        _write_atomically(joined, self.folder / "whole.tmp", self._output)
        shutil.rmtree(self.folder)

    def _path(self, start: int) -> Path:
        return self.folder / f"{start:012d}.parquet"


class ResponseTable:
    """Builds tables with all columns that any row of a data set has, one type per column.

    Types are determined from all rows before anything is generated. `notes` list the columns that are converted.
    """

    def __init__(self, dataset: PromptDataset, *, has_episodes: bool = False) -> None:
        self.notes: list[str] = []
        self._new = RESPONSE_COLUMNS | (EPISODE_COLUMNS if has_episodes else {})
        self._columns: dict[str, tuple[pa.DataType, Callable[[Any], Any]]] = {}
        for name in dataset.names():
            if name in self._new:
                self.notes.append(f"column '{name}' of the files is dropped: it will hold the new responses")
                continue
            self._columns[name] = _find_type(dataset.column(name))
            if self._columns[name][1] is _to_json:
                self.notes.append(f"column '{name}' has values of different types and is written as JSON text")
        self._schema = pa.schema({name: kind for name, (kind, _) in self._columns.items()} | self._new)

    def build(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        """Return a table of rows with their responses; a column that a row lacks is null."""
        converted = [
            {name: convert(row.get(name)) for name, (_, convert) in self._columns.items()}
            | {name: row[name] for name in self._new}
            for row in rows
        ]
        return pa.Table.from_pylist(converted, schema=self._schema)


def _write_atomically(table: pa.Table, temporary: Path, path: Path) -> None:
    pq.write_table(table, temporary)
    os.replace(temporary, path)


def _find_type(values: Sequence[Any]) -> tuple[pa.DataType, Callable[[Any], Any]]:
    """Return the type of a column, and the conversion of its values."""
    for convert in (_keep, _drop_empty):
        try:
            kind = pa.array([convert(value) for value in values]).type
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            break
        if not _has_empty_struct(kind):
            return kind, convert
    return pa.string(), _to_json


def _keep(value: Any) -> Any:
    return value


def _drop_empty(value: Any) -> Any:
    """Replace {} by None: Parquet cannot store a struct without fields."""
    if isinstance(value, Mapping):
        return {key: _drop_empty(each) for key, each in value.items()} or None
    return [_drop_empty(each) for each in value] if isinstance(value, list) else value


def _to_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, default=str)


def _has_empty_struct(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind) and not kind.num_fields:
        return True
    return any(_has_empty_struct(kind.field(index).type) for index in range(kind.num_fields))
