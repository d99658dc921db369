"""The examples of data files, measured once at start and read when their turn comes; and their share for every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from verl.data.chat import PromptError
from verl.data.dataset import DataReport
from verl.data.files import BlockCache, ColumnChunk, Rows, find_files, open_rows, to_python
from verl.data.lengths import TokenCounter, measure_lengths
from verl.data.plan import MicroBatchLimit
from verl.data.validate import PathLike, describe_missing_column, list_entries
from verl.errors import DataError
from verl.sft.examples import Example, ExampleReader

__all__ = ["ExampleDataset", "RankBatch", "split_batch"]

LOOKED_AT = 1000  # of the examples that are cut


class ExampleDataset:
    """The examples of one or several Parquet or JSONL files; `dataset[row]` is an `Example`.

    All are read once at start, so that a row that is wrong is known before anything is trained. `lengths [N]` are the
    tokens of each. Examples longer than `max_length` are refused then (`truncation="error"`), or cut on a side.
    """

    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        reader: ExampleReader,
        *,
        max_length: int,
        truncation: str = "error",
        max_samples: int = -1,
        num_workers: int | None = 0,
        cache_dir: Path | None = None,
    ) -> None:
        self._reader, self._limit, self._truncation = reader, max_length, truncation
        self.tokenizer = reader.tokenizer
        paths = [path for entry in list_entries(files) for path in find_files(entry)]
        cache = BlockCache()
        self.files = [open_rows(path, cache) for path in paths]
        for file in self.files:
            for setting, column in reader.keys.items():
                if wrong := describe_missing_column(file, column, setting, reader.keys):
                    raise DataError(wrong)
        self._ends = np.cumsum([len(file) for file in self.files])
        name = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
        rows = int(self._ends[-1]) if max_samples < 0 else min(int(self._ends[-1]), max_samples)
        if rows == 0:
            raise DataError(f"{', '.join(map(str, paths))}: no rows. Fill the file, or name another")
        found, from_cache = measure_lengths(
            self.files,
            rows,
            tuple(reader.keys.values()),
            _ExampleRuler(reader),
            processes=num_workers,
            folder=cache_dir,
        )
        long = np.flatnonzero(found > max_length)
        if len(long) and truncation == "error":
            raise DataError(self._too_long(int(long[0]), int(found[long[0]]), len(long), int(found.max())))
        self.lengths = np.minimum(found, max_length)
        self.report = DataReport(name, rows, 0, len(long), rows, max_length, from_cache)
        self._long = long

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Example:
        file, local = self._locate(row)
        try:
            return self._reader(file.row(local)).cut(self._limit, self._truncation)
        except DataError as error:
            raise DataError(f"{file.location(local)}: {error}") from None

    def cautions(self) -> list[str]:
        """What is worth saying of examples that are cut: of some nothing may be left to train on."""
        looked_at = self._long[:LOOKED_AT].tolist()
        empty = [row for row in looked_at if not self[row].mask.any()]
        if not empty:
            return []
        file, local = self._locate(empty[0])
        return [
            f"{self.report.name}: of {len(looked_at):,} examples that are cut {len(empty):,} have no token left to "
            f"train on (the first: {file.location(local)}): what comes before the answer fills "
            f"data.max_length={self._limit}; raise it, set data.truncation=left, or leave such rows out"
        ]

    def _locate(self, row: int) -> tuple[Rows, int]:
        which = int(np.searchsorted(self._ends, row, side="right"))
        file = self.files[which]
        return file, row - int(self._ends[which]) + len(file)

    def _too_long(self, row: int, length: int, count: int, longest: int) -> str:
        file, local = self._locate(row)
        others = f", and so have {count - 1} others (the longest {longest})" if count > 1 else ""
        return (
            f"{file.location(local)}: the example has {length} tokens, more than data.max_length={self._limit}"
            f"{others}. Set data.max_length={longest}, or data.truncation=right or left"
        )


@dataclass(frozen=True, slots=True)
class _ExampleRuler:
    """Measures examples, by making them."""

    reader: ExampleReader

    def __call__(self, chunk: ColumnChunk) -> npt.NDArray[np.int32]:
        lengths = []
        for index, row in enumerate(to_python(chunk)):
            try:
                lengths.append(len(self.reader(row).tokens))
            except DataError as error:
                raise PromptError(index, str(error)) from None
        return np.array(lengths, np.int32)

    def fingerprint(self) -> str | None:
        reader = self.reader
        template = TokenCounter(reader.tokenizer, reader.template_kwargs or {}).fingerprint()
        parts = f"{template} {reader.stops} {reader.keys}"
        return None if template is None else hashlib.sha256(parts.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class RankBatch:
    """What one rank trains on in one step: B examples laid end to end, one micro-batch after another."""

    tokens: npt.NDArray[np.int32]  # [T]
    mask: npt.NDArray[np.bool_]  # [T]
    offsets: npt.NDArray[np.int64]  # [B+1] example b is tokens[offsets[b]:offsets[b+1]]
    ends: npt.NDArray[np.int64]  # [M] the example after the last of each micro-batch

    @classmethod
    def of(cls, micro_batches: Sequence[Sequence[Example]]) -> RankBatch:
        examples = list(chain.from_iterable(micro_batches))
        return cls(
            tokens=np.concatenate([np.empty(0, np.int32), *(example.tokens for example in examples)]),
            mask=np.concatenate([np.empty(0, np.bool_), *(example.mask for example in examples)]),
            offsets=np.cumsum([0, *(len(example.tokens) for example in examples)], dtype=np.int64),
            ends=np.cumsum([len(part) for part in micro_batches], dtype=np.int64),
        )


def split_batch(examples: Sequence[Example], ranks: int, limit: MicroBatchLimit) -> list[RankBatch]:
    """Every rank's part of a batch: even in tokens, and cut into equally many micro-batches (some may be empty)."""
    lengths = [len(example.tokens) for example in examples]
    held = limit.balance(lengths, ranks)
    cuts = limit.split([[lengths[k] for k in own] for own in held])
    return [
        RankBatch.of([[examples[own[k]] for k in part] for part in parts])
        for own, parts in zip(held, cuts, strict=True)
    ]
