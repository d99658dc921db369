"""Data sets of examples, and how a batch of them is split over ranks."""

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
from verl.data.files import ColumnChunk, Files, FileSet, to_python
from verl.data.lengths import TokenCounter, measure_lengths
from verl.data.plan import MicroBatchLimit
from verl.data.validate import describe_missing_column
from verl.errors import DataError
from verl.sft.examples import Example, ExampleReader

MAX_CHECKED = 1000  # truncated examples that are checked for trained tokens


class ExampleDataset(FileSet):
    """The examples of one or several Parquet or JSONL files; `dataset[row]` is an `Example`.

    All are read once at start, so that a bad row is found before training. `lengths [N]` counts the tokens of each.
    Examples longer than `max_length` are an error (`truncation="error"`) or truncated on one side.
    """

    def __init__(
        self,
        files: Files,
        reader: ExampleReader,
        *,
        max_length: int,
        truncation: str = "error",
        max_samples: int = -1,
        num_workers: int | None = 0,
        cache_dir: Path | None = None,
    ) -> None:
        super().__init__(files)
        self._reader, self._limit, self._truncation = reader, max_length, truncation
        self.tokenizer = reader.tokenizer
        for file in self.files:
            for setting, column in reader.keys.items():
                if problem := describe_missing_column(file, column, setting, reader.keys):
                    raise DataError(problem)
        rows = self.count_rows(max_samples)
        lengths, from_cache = measure_lengths(
            self.files,
            rows,
            tuple(reader.keys.values()),
            _ExampleLengths(reader),
            processes=num_workers,
            folder=cache_dir,
        )
        long = np.flatnonzero(lengths > max_length)
        if len(long) and truncation == "error":
            raise DataError(self._explain_too_long(int(long[0]), int(lengths[long[0]]), len(long), int(lengths.max())))
        self.lengths = np.minimum(lengths, max_length)
        self.report = DataReport(self.name, rows, 0, len(long), rows, max_length, from_cache)
        self._long = long

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Example:
        file, local = self.locate(row)
        try:
            return self._reader(file.row(local)).truncate(self._limit, self._truncation)
        except DataError as error:
            raise DataError(f"{file.location(local)}: {error}") from None

    def truncation_warnings(self) -> list[str]:
        """Warn of truncated examples that have no trained token left."""
        checked = self._long[:MAX_CHECKED].tolist()
        empty = [row for row in checked if not self[row].mask.any()]
        if not empty:
            return []
        return [
            f"{self.name}: {len(empty):,} of {len(checked):,} truncated examples have no token left to train on "
            f"(the first: {self.location(empty[0])}): what precedes the response fills data.max_length={self._limit}. "
            "Increase it, set data.truncation=left, or remove such rows"
        ]

    def _explain_too_long(self, row: int, length: int, count: int, longest: int) -> str:
        others = f"; {count - 1} more are too long (the longest: {longest})" if count > 1 else ""
        return (
            f"{self.location(row)}: the example has {length} tokens, more than data.max_length={self._limit}"
            f"{others}. Set data.max_length={longest}, or data.truncation=right or left"
        )


@dataclass(frozen=True, slots=True)
class _ExampleLengths:
    """Counts the tokens of examples."""

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
    """What one rank trains on in one step: B examples, concatenated, one micro-batch after another."""

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
    """Split a batch over ranks, balanced by tokens, into equally many micro-batches on each (some may be empty)."""
    lengths = [len(example.tokens) for example in examples]
    by_rank = limit.balance(lengths, ranks)
    micro_batches = limit.split([[lengths[k] for k in indices] for indices in by_rank])
    return [
        RankBatch.of([[examples[indices[k]] for k in part] for part in parts])
        for indices, parts in zip(by_rank, micro_batches, strict=True)
    ]
