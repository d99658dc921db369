"""Data files as numbered rows, read when asked for: Parquet by row group, JSONL by line.

Neither puts the file into Python objects: of a Parquet file some decoded row groups are kept (Arrow memory, bounded),
of a JSONL file the places of its lines.
"""

from __future__ import annotations

import difflib
import glob
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.errors import DataError

__all__ = ["JsonlRows", "ParquetRows", "Rows", "find_files", "open_rows"]

READ_AT_ONCE = 1024  # rows turned into Python objects at a time by a pass over a whole column
CACHED_BYTES = 256 * 2**20  # decoded row groups kept per Parquet file


class Rows(Protocol):
    """The rows of one file."""

    path: Path
    columns: list[str]

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """One row, all columns."""
        ...

    def values(self, column: str) -> Iterator[list[Any]]:
        """One column from first row to last, in lists of at most `READ_AT_ONCE`."""
        ...

    def place(self, index: int) -> str:
        """Where a user finds this row."""
        ...


def find_files(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Existing files for one or several paths; `~` and patterns such as `data/*.parquet` are expanded."""
    found: list[Path] = []
    for name in [files] if isinstance(files, (str, os.PathLike)) else files:
        path = Path(name).expanduser()
        matches = [path] if path.is_file() else [Path(match) for match in sorted(glob.glob(str(path)))]
        matches = [match for match in matches if match.is_file()]
        if not matches:
            raise DataError(_not_found(path))
        found += matches
    if not found:
        raise DataError("no data files are given; set data.train_files and data.val_files to Parquet or JSONL files")
    return found


def open_rows(path: Path) -> Rows:
    """The rows of a file, by its suffix."""
    if path.suffix in (".parquet", ".pq"):
        return ParquetRows(path)
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return JsonlRows(path)
    raise DataError(f"{path} ends in '{path.suffix}'; data files are .parquet or .jsonl: convert it to one of them")


class ParquetRows:
    """A Parquet file, memory mapped. Row groups are decoded when one of their rows is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = pq.ParquetFile(path, memory_map=True)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}. Write it again, or rename it") from error
        self.columns = list(self._file.schema_arrow.names)
        meta = self._file.metadata
        sizes = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._decoded: OrderedDict[int, pa.Table] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, index: int) -> dict[str, Any]:
        group = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[group - 1]) if group else 0
        return self._row_group(group).slice(index - start, 1).to_pylist()[0]

    def values(self, column: str) -> Iterator[list[Any]]:
        for batch in self._file.iter_batches(READ_AT_ONCE, columns=[column]):
            yield batch.column(0).to_pylist()

    def place(self, index: int) -> str:
        return f"{self.path}, row {index}"

    def _row_group(self, group: int) -> pa.Table:
        """Decoded, from the cache; the ones not used for longest leave it when it grows over its bound."""
        if group in self._decoded:
            self._decoded.move_to_end(group)
            return self._decoded[group]
        table = self._decoded[group] = self._file.read_row_group(group, use_threads=False)
        self._bytes += table.nbytes
        while self._bytes > CACHED_BYTES and len(self._decoded) > 1:
            self._bytes -= self._decoded.popitem(last=False)[1].nbytes
        return table


class JsonlRows:
    """A file with one JSON object a line. Blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        starts, numbers, place = [], [], 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    starts.append((place, place + len(line)))
                    numbers.append(number)
                place += len(line)
        self._spans = np.array(starts, np.int64).reshape(-1, 2)
        self._lines = np.array(numbers, np.int64)
        self._file = path.open("rb")
        self.columns = list(self.row(0)) if len(self) else []

    def __len__(self) -> int:
        return len(self._spans)

    def row(self, index: int) -> dict[str, Any]:
        start, stop = self._spans[index].tolist()
        try:
            row = json.loads(os.pread(self._file.fileno(), stop - start, start))
        except ValueError as error:
            raise DataError(f"{self.place(index)}: not valid JSON: {error}. Each line is one JSON object") from None
        if not isinstance(row, dict):
            raise DataError(f"{self.place(index)}: holds a {type(row).__name__}; each line is one JSON object")
        return row

    def values(self, column: str) -> Iterator[list[Any]]:
        for start in range(0, len(self), READ_AT_ONCE):
            yield [self.row(index).get(column) for index in range(start, min(start + READ_AT_ONCE, len(self)))]

    def place(self, index: int) -> str:
        return f"{self.path}, line {self._lines[index]}"


def _not_found(path: Path) -> str:
    why = "is a folder" if path.is_dir() else "matches no file" if glob.has_magic(path.name) else "does not exist"
    folder = path
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    near = difflib.get_close_matches(path.name, names, n=1)
    mend = f"Did you mean {folder / near[0]}?" if near else "Set data.train_files or data.val_files to existing files"
    return f"data file not found: {path} {why}; {folder} has: {shown or 'nothing'}. {mend}"
