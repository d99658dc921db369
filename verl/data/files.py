"""Data files as numbered rows, read on demand: Parquet by block, JSONL by line.

Neither is loaded into Python objects: for Parquet some decoded blocks are cached (Arrow memory, bounded over all files
of a data set), for JSONL the offsets of its lines.
"""

from __future__ import annotations

import difflib
import glob
import json
import os
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.remote_files import fetch_files, is_remote
from verl.errors import DataError

READ_AT_ONCE = 1024  # rows converted to Python objects at a time by a pass over a column
CACHED_BYTES = 256 * 2**20  # decoded blocks, over all files of a data set
BLOCK_ROWS = 4096  # a streamed row group of at least twice this many rows is split
BLOCK_BYTES = 16 * 2**20  # ... as is one of at least twice this many bytes
BUFFER_BYTES = 2**18  # read buffer of each column of a streamed file
STREAMED_ROWS = 1_000_000  # files with as many rows are streamed, unless the settings decide
STREAMED_BYTES = 2**30  # ... as are those of this size

PathLike = str | os.PathLike[str]
Files: TypeAlias = "PathLike | Sequence[PathLike]"
"""Paths, addresses and patterns, as in `data.train_files`."""

Columns: TypeAlias = "str | tuple[str, ...]"
"""One column, or several: then a value is a dict."""

ColumnChunk: TypeAlias = "list[Any] | pa.Array"
"""Some values of a column, not yet converted to Python objects if another process may do that."""


def to_python(chunk: ColumnChunk) -> list[Any]:
    return chunk if isinstance(chunk, list) else chunk.to_pylist()


class Rows(ABC):
    """The rows of one file, and the ends of the blocks in which they are read."""

    path: Path
    columns: list[str]
    bytes: int
    """The approximate size of all rows in memory."""
    block_ends: npt.NDArray[np.int64]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> dict[str, Any]:
        """Return all columns of one row."""

    @abstractmethod
    def iter_chunks(self, column: Columns) -> Iterator[ColumnChunk]:
        """Yield one or several columns, from first row to last, in chunks of at most `READ_AT_ONCE` rows.

        A column that the file lacks is None, or missing from the dicts.
        """

    @abstractmethod
    def location(self, index: int) -> str:
        """Return the location of a row, for messages."""

    def has(self, column: str) -> bool:
        """Return whether any row has the column; `columns` are those known without reading all rows."""
        return column in self.columns

    def values(self, column: Columns) -> Iterator[Any]:
        """Yield the value of one or several columns in every row."""
        for chunk in self.iter_chunks(column):
            yield from to_python(chunk)


class FileSet:
    """Some files as one sequence of rows. A subclass defines which of them are used, and as what.

    `streaming=None` streams large files: see `open_rows`.
    """

    def __init__(self, files: Files, *, streaming: bool | None = False) -> None:
        entries = [find_files(entry) for entry in list_entries(files)] or [find_files([])]
        paths = [path for entry in entries for path in entry]
        cache, self.is_streamed = BlockCache(), bool(streaming)
        self.files = [open_rows(path, cache, streamed=self.is_streamed) for path in paths]
        self.total_rows = sum(map(len, self.files))
        self.bytes = sum(file.bytes for file in self.files)
        if streaming is None and (self.total_rows >= STREAMED_ROWS or self.bytes >= STREAMED_BYTES):
            self.is_streamed = True
            self.files = [open_rows(path, cache, streamed=True) for path in paths]
        self.name = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
        self._ends = np.cumsum([len(file) for file in self.files])
        self._entry_ends = self._ends[np.cumsum([len(entry) for entry in entries]) - 1]

    def locate(self, row: int) -> tuple[Rows, int]:
        """Return the file of a row, counted over all files, and its index there."""
        which = int(np.searchsorted(self._ends, row, side="right"))
        file = self.files[which]
        return file, row - int(self._ends[which]) + len(file)

    def location(self, row: int) -> str:
        """Return the location of a row, for messages."""
        file, index = self.locate(row)
        return file.location(index)

    def count_rows(self, max_samples: int) -> int:
        """Return how many rows are used, -1 for all of them; raise `DataError` if there are none."""
        rows = self.total_rows if max_samples < 0 else min(self.total_rows, max_samples)
        if rows == 0:
            names = ", ".join(str(file.path) for file in self.files)
            raise DataError(f"{names}: no rows. Fill the file, or check data.train_max_samples and val_max_samples")
        return rows


def list_entries(files: Files) -> list[PathLike]:
    """Return the entries of a setting as a list; each is a path or a pattern."""
    return [files] if isinstance(files, str | os.PathLike) else list(files)


def find_files(files: Files) -> list[Path]:
    """Return existing files for one or several paths; `~` and patterns such as `data/*.parquet` are expanded.

    Files at an address such as `hf://datasets/...` are copied to this machine.
    """
    paths: list[Path] = []
    for name in list_entries(files):
        if is_remote(name):
            paths += fetch_files(str(name))
            continue
        path = Path(name).expanduser()
        matches = [path] if path.is_file() else [Path(match) for match in sorted(glob.glob(str(path)))]
        matches = [match for match in matches if match.is_file()]
        if not matches:
            raise DataError(_describe_missing_file(path))
        paths += matches
    if not paths:
        raise DataError("no data files are given; set data.train_files and data.val_files to Parquet or JSONL files")
    return paths


def open_rows(path: Path, cache: BlockCache | None = None, *, streamed: bool = False) -> Rows:
    """Open a file by its suffix. Files with the same cache share its memory limit.

    With `streamed`, blocks are small however the file was written; otherwise a block is a whole row group.
    """
    if path.suffix in (".parquet", ".pq"):
        return ParquetRows(path, cache or BlockCache(), streamed=streamed)
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return JsonlRows(path)
    raise DataError(f"{path} ends in '{path.suffix}'; data files are .parquet or .jsonl: convert it to one of them")


class BlockCache:
    """A least-recently-used cache of decoded blocks of some files.

    It also holds the last scan of a row group that is read block by block, from which the next block continues.
    """

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[Path, int], pa.Table] = OrderedDict()
        self._bytes = 0
        self.scan: _Scan | None = None

    def get(self, key: tuple[Path, int]) -> pa.Table | None:
        if key in self._tables:
            self._tables.move_to_end(key)
        return self._tables.get(key)

    def put(self, key: tuple[Path, int], table: pa.Table) -> None:
        self._tables[key] = table
        self._bytes += table.nbytes
        while self._bytes > CACHED_BYTES and len(self._tables) > 1:
            self._bytes -= self._tables.popitem(last=False)[1].nbytes


class _Scan:
    """A forward pass over one row group: its pages cannot be entered in the middle."""

    def __init__(self, file: pq.ParquetFile, group: int) -> None:
        self.file, self.group, self.position = file, group, 0
        self._batches = file.iter_batches(READ_AT_ONCE, row_groups=[group], use_threads=False)
        self._batch: pa.RecordBatch | None = None

    def read(self, start: int, stop: int) -> pa.Table:
        """Return rows `start` to `stop` of the group; earlier ones are decoded and dropped."""
        batches: list[pa.RecordBatch] = []
        while self.position < stop:
            batch = self._batch if self._batch is not None else next(self._batches)
            count = min(len(batch), (start if self.position < start else stop) - self.position)
            if self.position >= start:
                batches.append(batch.slice(0, count))
            self._batch = batch.slice(count) if count < len(batch) else None
            self.position += count
        return pa.Table.from_batches(batches)


class ParquetRows(Rows):
    """A Parquet file, decoded block by block on demand.

    A block is a row group. In a streamed file a large row group is split (some writers put a million rows into one), to
    keep memory small; reading a block then scans the row group up to it, half a second for a million short rows.
    """

    def __init__(self, path: Path, cache: BlockCache, *, streamed: bool = False) -> None:
        self.path, self._cache = path, cache
        # Mapped pages count as memory of this process once they are read; for a large file that is too much.
        options: dict[str, Any] = (
            {"buffer_size": BUFFER_BYTES, "pre_buffer": False} if streamed else {"memory_map": True}
        )
        try:
            self._file = pq.ParquetFile(path, **options)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}. Write it again, or fix its suffix") from error
        self.columns = list(self._file.schema_arrow.names)
        meta = self._file.metadata
        sizes, ends, start = [], [np.empty(0, np.int64)], 0
        self.bytes = 0
        for group in map(meta.row_group, range(meta.num_row_groups)):
            parts = max(1, group.num_rows // BLOCK_ROWS, group.total_byte_size // BLOCK_BYTES) if streamed else 1
            parts = min(parts, max(1, group.num_rows))
            ends.append(start + np.arange(1, parts + 1) * group.num_rows // parts)
            start += group.num_rows
            sizes.append(group.num_rows)
            self.bytes += group.total_byte_size
        self._group_ends = np.cumsum(sizes, dtype=np.int64)
        self.block_ends = np.concatenate(ends)

    def __len__(self) -> int:
        return int(self._group_ends[-1]) if len(self._group_ends) else 0

    def row(self, index: int) -> dict[str, Any]:
        block = int(np.searchsorted(self.block_ends, index, side="right"))
        start = int(self.block_ends[block - 1]) if block else 0
        return self._decode(block, start).slice(index - start, 1).to_pylist()[0]

    def iter_chunks(self, column: Columns) -> Iterator[ColumnChunk]:
        names = [name for name in ([column] if isinstance(column, str) else column) if name in self.columns]
        for batch in self._file.iter_batches(READ_AT_ONCE, columns=names):
            if not names:
                yield [None if isinstance(column, str) else {}] * len(batch)
            else:
                yield batch.column(0) if isinstance(column, str) else batch.to_struct_array()

    def location(self, index: int) -> str:
        return f"{self.path}, row {index}"

    def _decode(self, block: int, start: int) -> pa.Table:
        table = self._cache.get((self.path, block))
        if table is None:
            table = self._read(start, int(self.block_ends[block]))
            self._cache.put((self.path, block), table)
        return table

    def _read(self, start: int, stop: int) -> pa.Table:
        group = int(np.searchsorted(self._group_ends, start, side="right"))
        first = int(self._group_ends[group - 1]) if group else 0
        if (start, stop) == (first, int(self._group_ends[group])):
            return self._file.read_row_group(group, use_threads=False)
        scan = self._cache.scan
        if scan is None or (scan.file, scan.group) != (self._file, group) or scan.position > start - first:
            scan = self._cache.scan = _Scan(self._file, group)
        return scan.read(start - first, stop - first)


class JsonlRows(Rows):
    """A file with one JSON object per line, without blank lines. Opening it reads it once, to find the lines."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes = path, path.stat().st_size
        lines, offset = array("q"), 0
        with path.open("rb") as file:
            for line_number, line in enumerate(file, start=1):
                if not line.isspace():
                    lines.extend((line_number, offset, len(line)))
                offset += len(line)
        self._lines = np.array(lines, np.int64).reshape(-1, 3)
        self._file = path.open("rb")
        self.block_ends = np.append(np.arange(BLOCK_ROWS, len(self), BLOCK_ROWS), [len(self)] if len(self) else [])
        self.columns = self._read_column_names()

    def __len__(self) -> int:
        return len(self._lines)

    def _read_column_names(self) -> list[str]:
        """Return the columns of the first rows. Later rows may have more: see `has`."""
        names = dict.fromkeys(self.row(0)) if len(self) else {}
        for index in range(1, min(len(self), READ_AT_ONCE)):
            with suppress(DataError):  # raised again when that row is read
                names |= dict.fromkeys(self.row(index))
        return list(names)

    def has(self, column: str) -> bool:
        return column in self.columns or any(column in self.row(index) for index in range(READ_AT_ONCE, len(self)))

    def row(self, index: int) -> dict[str, Any]:
        _, offset, size = self._lines[index].tolist()
        try:
            row = json.loads(os.pread(self._file.fileno(), size, offset))
        except ValueError as error:
            raise DataError(
                f"{self.location(index)}: not valid JSON: {error}. Each line must be one JSON object"
            ) from None
        if not isinstance(row, dict):
            raise DataError(f"{self.location(index)}: holds a {type(row).__name__}; each line must be one JSON object")
        return row

    def iter_chunks(self, column: Columns) -> Iterator[ColumnChunk]:
        for start in range(0, len(self), READ_AT_ONCE):
            rows = [self.row(index) for index in range(start, min(start + READ_AT_ONCE, len(self)))]
            if isinstance(column, str):
                yield [row.get(column) for row in rows]
            else:
                yield [{name: row.get(name) for name in column} for row in rows]

    def location(self, index: int) -> str:
        return f"{self.path}, line {self._lines[index, 0]}"


def _describe_missing_file(path: Path) -> str:
    reason = "is a folder" if path.is_dir() else "matches no file" if glob.has_magic(path.name) else "does not exist"
    listing, near = suggest_path(path)
    fix = f"Did you mean {near}?" if near else "Set data.train_files or data.val_files to existing files"
    return f"data file not found: {path} {reason}; {listing}. {fix}"


def suggest_path(path: Path) -> tuple[str, Path | None]:
    """Describe the folder of a missing path, and return the entry probably meant."""
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f"{folder} does not exist", None
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"{folder} contains: {shown or 'nothing'}", folder / near[0] if near else None
