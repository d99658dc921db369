"""Prompts from files, tokenized one by one on demand.

Prompts that are too long are found at start, in a pass over all of them (`lengths`), or, in streamed files, when they
are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from verl.data.chat import TRUNCATIONS, PromptError, encode_prompts, truncate
from verl.data.files import BlockCache, JsonlRows, Rows, find_files, open_rows
from verl.data.lengths import TokenCounter, measure_lengths
from verl.data.validate import PathLike, describe_missing_column, list_entries
from verl.errors import DataError
from verl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRUTHS = ("ground_truth", "answer")
"""Columns of the ground truth if `reward_model` has none; the first that exists is used."""
_SOURCES = ("data_source", "reward_model")
"""The columns that may hold the data source of a row."""
STREAMED_ROWS = 1_000_000
STREAMED_BYTES = 2**30
SAMPLE = 64  # rows of a streamed data set that are checked before a run
SAMPLED_FILES = 8


@dataclass(frozen=True, slots=True)
class DataReport:
    """The row counts of the files.

    >>> print(DataReport("train.parquet", rows=7473, overlong=12, truncated=0, kept=7461, limit=512))
    train.parquet: 7,473 rows, 12 dropped for being longer than 512 tokens, 7,461 kept
    """

    name: str
    rows: int
    overlong: int
    truncated: int
    kept: int
    limit: int
    from_cache: bool = False
    streamed: bool = False

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.rows:,} rows"]
        if self.streamed:
            return f"{parts[0]}, streamed: each is read and measured when it is needed"
        if self.overlong:
            parts.append(f"{self.overlong:,} dropped for being longer than {self.limit:,} tokens")
        if self.truncated:
            parts.append(f"{self.truncated:,} truncated to {self.limit:,} tokens")
        return ", ".join([*parts, f"{self.kept:,} kept"]) + " (lengths from the cache)" * self.from_cache


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How rows become prompts.

    Prompts longer than `max_prompt_length` tokens are dropped (`filter_overlong`), truncated on the side that
    `truncation` names, or ("error") refused. With `streaming` memory does not grow with the files, and long prompts are
    found when they are read; None streams from a million rows or a GiB on. `max_samples=-1` reads all rows.
    """

    max_prompt_length: int
    prompt_key: str = "prompt"
    filter_overlong: bool = True
    truncation: str = "error"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_samples: int = -1
    streaming: bool | None = False

    def __post_init__(self) -> None:
        if self.truncation not in TRUNCATIONS:
            raise DataError(f"data.truncation is {self.truncation!r}; it must be one of {', '.join(TRUNCATIONS)}")


class PromptDataset:
    """The prompts of one or several Parquet or JSONL files. `dataset[i]` is a `Prompt`, whose `row` counts over all
    files, dropped rows included; None if a streamed prompt is dropped.

    Finding long prompts takes a pass over all of them, in `num_workers` processes if there are many, cached in
    `cache_dir`. It is skipped for streamed files, and with `kept`, the rows that another process found.

    The arguments of a reward function come from the columns `data_source`, `extra_info`, and `reward_model`
    (`{"ground_truth": ...}`) or `ground_truth` or `answer`; all other columns are added to `extra_info`.
    """

    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        tokenizer: PreTrainedTokenizerBase,
        options: PromptOptions,
        *,
        num_workers: int | None = 0,
        cache_dir: Path | None = None,
        kept: npt.NDArray[np.int64] | range | None = None,
    ) -> None:
        self._tokenizer, self._options, self._limit = tokenizer, options, options.max_prompt_length
        is_streamed = self._open_files(files)
        rows = int(self._ends[-1])
        rows = min(rows, options.max_samples) if options.max_samples >= 0 else rows
        if rows == 0:
            names = ", ".join(str(file.path) for file in self.files)
            raise DataError(f"{names}: no rows. Fill the file, or check data.train_max_samples and val_max_samples")
        self.kept: npt.NDArray[np.int64] | range
        truncated, from_cache = 0, False
        if is_streamed:
            self.kept = range(rows)
        elif kept is not None:
            self.kept = kept
        else:
            counter = TokenCounter(tokenizer, options.chat_template_kwargs)
            lengths, from_cache = measure_lengths(
                self.files, rows, options.prompt_key, counter, processes=num_workers, folder=cache_dir
            )
            self.kept, truncated = self._drop_overlong(lengths)
        count = len(self.kept)
        self.report = DataReport(self._name, rows, rows - count, truncated, count, self._limit, from_cache, is_streamed)

    def _open_files(self, files: PathLike | Sequence[PathLike]) -> bool:
        """Open the files, and return whether they are streamed."""
        entries = [find_files(entry) for entry in list_entries(files)] or [find_files([])]
        paths = [path for entry in entries for path in entry]
        cache, is_streamed = BlockCache(), bool(self._options.streaming)
        self.files = [open_rows(path, cache, streamed=is_streamed) for path in paths]
        if self._options.streaming is None and _are_large(self.files):
            is_streamed = True
            self.files = [open_rows(path, cache, streamed=True) for path in paths]
        for file in self.files:
            if problem := describe_missing_column(file, self._options.prompt_key, "prompt_key"):
                raise DataError(problem)
        self._ends = np.cumsum([len(file) for file in self.files])
        self._entry_ends = self._ends[np.cumsum([len(entry) for entry in entries]) - 1]
        self._name = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
        return is_streamed

    def __len__(self) -> int:
        return len(self.kept)

    def __iter__(self) -> Iterator[Prompt]:
        return (prompt for prompt in map(self.__getitem__, range(len(self))) if prompt is not None)

    @property
    def entry_ends(self) -> list[int]:
        """The end of the prompts of each entry of `files`; a pattern is one entry."""
        if isinstance(self.kept, range):  # all rows, too many for an array
            return [min(end, len(self.kept)) for end in self._entry_ends.tolist()]
        return np.searchsorted(self.kept, self._entry_ends).tolist()

    @property
    def bytes_per_row(self) -> float:
        """The approximate size of a row in memory."""
        return sum(file.bytes for file in self.files) / int(self._ends[-1])

    def block_ends(self) -> npt.NDArray[np.int64]:
        """Return the ends of the blocks in which a streamed data set is read; a block is within one file."""
        firsts = [0, *self._ends[:-1].tolist()]
        ends = np.concatenate([first + file.block_ends for first, file in zip(firsts, self.files, strict=True)])
        return np.unique(np.minimum(ends, len(self.kept)))

    def names(self) -> list[str]:
        """Return the columns of all rows; reads all lines of JSONL files."""
        names: dict[str, None] = {}
        for file in self.files:
            lines = map(file.row, range(len(file))) if isinstance(file, JsonlRows) else [file.columns]
            for columns in lines:
                names |= dict.fromkeys(columns)
        return list(names)

    def column(self, name: str) -> list[Any]:
        """Return the value of a column for every prompt; None if a file has no such column."""
        values: list[Any] = []
        for file in self.files:
            has = name in file.columns or isinstance(file, JsonlRows)
            values += [value for part in file.values(name) for value in part] if has else [None] * len(file)
        return [values[row] for row in self.kept]

    def numbers(self, name: str) -> npt.NDArray[np.float64]:
        """Return a column of numbers, such as the difficulty of every prompt."""
        values = self.column(name)
        for row, value in zip(self.kept, values, strict=True):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                file, local = self._locate(int(row))
                raise DataError(
                    f"{file.location(local)}, column '{name}': {value!r} is not a finite number, which "
                    "data.curriculum_key requires; fix the row, or name another column"
                )
        return np.array(values, np.float64)

    def sample(self) -> list[Prompt | None]:
        """Return some prompts from the beginning of the files, to check a streamed data set quickly."""
        firsts = [0, *self._ends[:-1].tolist()]
        spread = [first for first, file in zip(firsts, self.files, strict=True) if first < len(self) and len(file)]
        spread = spread[:: -(-len(spread) // SAMPLED_FILES)]
        each = SAMPLE // len(spread)
        rows = [row for first in spread for row in range(first, min(first + each, len(self)))]
        prompts = [self[row] for row in rows]
        if not any(prompts):
            raise DataError(
                f"{self._name}: all {len(prompts)} prompts that were checked are longer than "
                f"data.max_prompt_length={self._limit}. Raise it"
            )
        return prompts

    def sources(self) -> list[str]:
        """Return the `data_source` of every prompt; "" if a row has none."""
        sources: list[str] = []
        for file in self.files:
            names = tuple(name for name in _SOURCES if name in file.columns or isinstance(file, JsonlRows))
            if not names:
                sources += [""] * len(file)
                continue
            rows = (row for chunk in file.values(names) for row in chunk)
            sources += [resolve_data_source(*(row.get(name) for name in _SOURCES)) for row in rows]
        return [sources[row] for row in self.kept]

    def __getitem__(self, index: int) -> Prompt | None:
        row = int(self.kept[index])
        file, local = self._locate(row)
        fields = file.row(local)
        raw = fields.pop(self._options.prompt_key, None)
        token_ids = self._encode(file, local, raw)
        if len(token_ids) > self._limit:
            if self._options.filter_overlong and self.report.streamed:
                return None
            if self._options.truncation == "error":
                raise DataError(self._too_long(row, len(token_ids), 1))
            token_ids = truncate(token_ids, self._limit, self._options.truncation)
        try:
            reward_fields = extract_reward_fields(fields)
        except DataError as error:
            raise DataError(f"{file.location(local)}: {error}") from None
        return Prompt(row, token_ids, **reward_fields, raw=raw)

    def row(self, index: int) -> dict[str, Any]:
        """Return all columns of the row of a prompt, as in its file."""
        file, local = self._locate(int(self.kept[index]))
        return file.row(local)

    def _drop_overlong(self, lengths: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], int]:
        """Return the rows to keep, and how many of them will be truncated."""
        rows = len(lengths)
        long = np.flatnonzero(lengths > self._limit)
        if not self._options.filter_overlong:
            if len(long) and self._options.truncation == "error":
                raise DataError(self._too_long(int(long[0]), int(lengths[long[0]]), len(long)))
            return np.arange(rows), len(long)
        if len(long) == rows:
            raise DataError(
                f"{self._name}: all {rows:,} prompts are longer than data.max_prompt_length={self._limit} "
                f"(the shortest has {lengths.min()} tokens, the longest {lengths.max()}). "
                f"Set data.max_prompt_length={lengths.max()} to keep them all"
            )
        return np.delete(np.arange(rows), long), 0

    def _encode(self, file: Rows, local: int, prompt: Any) -> list[int]:
        try:
            [token_ids] = encode_prompts(self._tokenizer, [prompt], self._options.chat_template_kwargs)
        except PromptError as error:
            raise DataError(f"{file.location(local)}, column '{self._options.prompt_key}': {error}") from None
        return token_ids

    def _locate(self, row: int) -> tuple[Rows, int]:
        which = int(np.searchsorted(self._ends, row, side="right"))
        file = self.files[which]
        return file, row - int(self._ends[which]) + len(file)

    def _too_long(self, row: int, length: int, count: int) -> str:
        file, local = self._locate(row)
        return (
            f"{file.location(local)}: the prompt has {length} tokens, more than data.max_prompt_length={self._limit}"
            + (f", as do {count - 1} others" if count > 1 else "")
            + ". Raise it, or set data.filter_overlong_prompts=True, or data.truncation=left, right or middle"
        )


def _are_large(files: Sequence[Rows]) -> bool:
    return sum(map(len, files)) >= STREAMED_ROWS or sum(file.bytes for file in files) >= STREAMED_BYTES


def extract_reward_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `data_source`, `ground_truth` and `extra_info` from all columns of a row except the prompt.

    >>> extract_reward_fields({"data_source": "sums", "reward_model": {"ground_truth": "46"}, "level": 2})
    {'data_source': 'sums', 'ground_truth': '46', 'extra_info': {'level': 2}}
    """
    source = resolve_data_source(fields.pop("data_source", None), fields.get("reward_model"))
    extra, model, truth = fields.pop("extra_info", None), fields.pop("reward_model", None), None
    if isinstance(model, Mapping):
        model = dict(model)
        truth = model.pop("ground_truth", None)
        model.pop("data_source", None)
        fields |= {**(model.pop("extra_info", None) or {}), **model}
    elif isinstance(model, str) and model.lstrip().startswith("{"):
        raise DataError(
            f"column 'reward_model' holds text, {model[:60]!r}; it must hold the fields themselves, such as "
            '{"ground_truth": ...}. Write the file again without json.dumps or str around them'
        )
    elif model is not None:
        fields["reward_model"] = model
    for column in TRUTHS:
        if truth is None:
            truth = fields.pop(column, None)
    if isinstance(extra, Mapping):
        fields |= extra
    elif extra is not None:
        fields["extra_info"] = extra
    return {"data_source": source, "ground_truth": truth, "extra_info": fields}


def resolve_data_source(column: Any, reward_model: Any) -> str:
    """Return the data source of a row: its column, or the field of `reward_model`, or ""."""
    if column is None and isinstance(reward_model, Mapping):
        column = reward_model.get("data_source")
    return "" if column is None else str(column)
