"""Prompts from files: found, checked and measured once at start, tokenised one by one when asked for."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from verl.data.chat import TRUNCATIONS, encode, render, truncate
from verl.data.columns import source_of, told_to_rewards
from verl.data.files import Rows, find_files, open_rows
from verl.errors import DataError
from verl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DataReport", "PromptDataset", "require_prompts"]

LIKELY_PROMPTS = ("prompt", "question", "problem", "messages", "conversations", "query", "instruction", "input", "text")


@dataclass(frozen=True, slots=True)
class DataReport:
    """What became of the rows of the files.

    >>> print(DataReport("train.parquet", rows=7473, overlong=12, truncated=0, kept=7461, limit=512))
    train.parquet: 7,473 rows, 12 dropped for being longer than 512 tokens, 7,461 kept
    """

    name: str
    rows: int
    overlong: int
    truncated: int
    kept: int
    limit: int

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.rows:,} rows"]
        if self.overlong:
            parts.append(f"{self.overlong:,} dropped for being longer than {self.limit:,} tokens")
        if self.truncated:
            parts.append(f"{self.truncated:,} truncated to {self.limit:,} tokens")
        return ", ".join([*parts, f"{self.kept:,} kept"])


class PromptDataset:
    """The prompts of one or several Parquet or JSONL files. `dataset[i]` is a `Prompt`, its `row` counted over all
    files before any is dropped.

    Prompts longer than `max_prompt_length` tokens are dropped (`filter_overlong`), or else cut on the side that
    `truncation` names, or else ("error") refused at once. Finding them needs a pass over all prompts; `kept`, the row
    numbers that another process found (its `dataset.kept`), spares it.

    What a reward function is told comes from the columns `data_source`, `extra_info`, and `reward_model`
    (`{"ground_truth": ...}`) or `ground_truth` or `answer`; all other columns are added to `extra_info`. With
    `keep_raw` a prompt also holds what stands in its own column.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        max_prompt_length: int,
        filter_overlong: bool = True,
        truncation: str = "error",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_samples: int = -1,
        keep_raw: bool = False,
        kept: npt.NDArray[np.int64] | None = None,
    ) -> None:
        if truncation not in TRUNCATIONS:
            raise DataError(f"data.truncation is {truncation!r}, it must be one of {', '.join(TRUNCATIONS)}")
        self._tokenizer, self._template_kwargs = tokenizer, dict(chat_template_kwargs or {})
        self._prompt_key, self._limit, self._truncation = prompt_key, max_prompt_length, truncation
        self._keep_raw = keep_raw
        paths = find_files(files)
        self._files = [open_rows(path) for path in paths]
        for file in self._files:
            _require_column(file, prompt_key)
        self._ends = np.cumsum([len(file) for file in self._files])
        self._name = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
        rows = int(self._ends[-1])
        rows = min(rows, max_samples) if max_samples >= 0 else rows
        if rows == 0:
            names = ", ".join(map(str, paths))
            raise DataError(f"{names}: no rows. Fill the file, or check data.train_max_samples and val_max_samples")

        self.kept: npt.NDArray[np.int64]
        if kept is None:
            self.kept, truncated = self._measure(rows, filter_overlong)
        else:
            self.kept, truncated = np.asarray(kept, np.int64), 0
        count = len(self.kept)
        self.report = DataReport(self._name, rows, rows - count, truncated, count, max_prompt_length)

    def __len__(self) -> int:
        return len(self.kept)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))

    def sources(self) -> list[str]:
        """The `data_source` of every prompt; "" where a row has none."""
        found: list[str] = []
        for file in self._files:
            if "data_source" in file.columns:
                found += [source_of(value, None) for chunk in file.values("data_source") for value in chunk]
            elif "reward_model" in file.columns:
                found += [source_of(None, value) for chunk in file.values("reward_model") for value in chunk]
            else:
                found += [""] * len(file)
        return [found[row] for row in self.kept]

    def __getitem__(self, index: int) -> Prompt:
        row = int(self.kept[index])
        file, local = self._locate(row)
        fields = file.row(local)
        raw = fields.pop(self._prompt_key, None)
        [token_ids] = self._encode(file, local, [raw])
        if len(token_ids) > self._limit:
            if self._truncation == "error":
                raise DataError(self._too_long(row, len(token_ids), 1))
            token_ids = truncate(token_ids, self._limit, self._truncation)
        try:
            told = told_to_rewards(fields)
        except DataError as error:
            raise DataError(f"{file.place(local)}: {error}") from None
        return Prompt(row, token_ids, **told, raw=raw if self._keep_raw else None)

    def _measure(self, rows: int, filter_overlong: bool) -> tuple[npt.NDArray[np.int64], int]:
        """The rows that stay, and how many of them will be truncated."""
        lengths = np.concatenate(list(self._lengths(rows)))
        long = np.flatnonzero(lengths > self._limit)
        if not filter_overlong:
            if len(long) and self._truncation == "error":
                raise DataError(self._too_long(int(long[0]), int(lengths[long[0]]), len(long)))
            return np.arange(rows), len(long)
        if len(long) == rows:
            raise DataError(
                f"{self._name}: all {rows:,} prompts are longer than data.max_prompt_length={self._limit} "
                f"(the shortest has {lengths.min()} tokens, the longest {lengths.max()}). "
                f"Set data.max_prompt_length={lengths.max()} to keep them all"
            )
        return np.delete(np.arange(rows), long), 0

    def _lengths(self, rows: int) -> Iterator[npt.NDArray[np.int64]]:
        """Tokens of the prompts of the first `rows` rows, in pieces."""
        for file, end in zip(self._files, self._ends, strict=True):
            first, start = int(end) - len(file), 0
            for values in file.values(self._prompt_key):
                values = values[: rows - first - start]
                yield np.array([len(ids) for ids in self._encode(file, start, values)], np.int64)
                start += len(values)
                if first + start >= rows:
                    return

    def _encode(self, file: Rows, start: int, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of consecutive rows of a file; the one path for measuring and for use."""
        texts: list[str] = []
        for prompt in prompts:
            try:
                texts.append(render(self._tokenizer, prompt, self._template_kwargs))
            except DataError as error:
                raise DataError(f"{file.place(start + len(texts))}, column '{self._prompt_key}': {error}") from None
        return encode(self._tokenizer, texts)

    def _locate(self, row: int) -> tuple[Rows, int]:
        which = int(np.searchsorted(self._ends, row, side="right"))
        file = self._files[which]
        return file, row - int(self._ends[which]) + len(file)

    def _too_long(self, row: int, length: int, count: int) -> str:
        file, local = self._locate(row)
        return (
            f"{file.place(local)}: the prompt has {length} tokens, more than data.max_prompt_length={self._limit}"
            + (f", and so have {count - 1} others" if count > 1 else "")
            + ". Raise it, or set data.filter_overlong_prompts=True, or data.truncation=left, right or middle"
        )


def require_prompts(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], prompt_key: str) -> None:
    """Raise `DataError` unless every file can be read and has the column of prompts. Reads no rows."""
    for path in find_files(files):
        _require_column(open_rows(path), prompt_key)


def _require_column(file: Rows, name: str) -> None:
    if name in file.columns or not len(file):
        return
    likely = [column for column in LIKELY_PROMPTS if column in file.columns]
    likely += difflib.get_close_matches(name, file.columns, n=1, cutoff=0.5)
    mend = f"Set data.prompt_key={likely[0]}" if likely else "Set data.prompt_key to the one that holds the prompts"
    raise DataError(f"column '{name}' not found in {file.path}; it has: {', '.join(file.columns)}. {mend}")
