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

from verl.data.chat import PromptError, encode_prompts, truncate
from verl.data.files import Files, FileSet, JsonlRows
from verl.data.lengths import TokenCounter, count_characters, get_longest_token, measure_lengths
from verl.data.validate import describe_missing_column
from verl.errors import DataError
from verl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRUTHS = ("ground_truth", "answer")
"""Columns of the ground truth if `reward_model` has none; the first that exists is used."""
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
    found when they are read; None streams files of at least a million rows or 1 GiB. `max_samples=-1` reads all rows.
    """

    max_prompt_length: int
    prompt_key: str = "prompt"
    filter_overlong: bool = True
    truncation: str = "error"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_samples: int = -1
    streaming: bool | None = False


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """The prompts of one split; `kept` are the rows that the controller has not filtered out.

    `teacher` is the path of a model that reads them in its own chat template.
    """

    files: list[str]
    options: PromptOptions
    kept: npt.NDArray[np.int64] | range
    teacher: str | None = None


class PromptDataset(FileSet):
    """The prompts of one or several Parquet or JSONL files. `dataset[i]` is a `Prompt`, whose `row` counts over all
    files, dropped rows included; None if a streamed prompt is dropped.

    Finding long prompts takes a pass over all of them, in `num_workers` processes if there are many, cached in
    `cache_dir`. It is skipped for streamed files, and with `kept`, the rows that another process found.

    The arguments of a reward function come from the columns `data_source`, `extra_info`, and `reward_model`
    (`{"ground_truth": ...}`) or `ground_truth` or `answer`; all other columns are added to `extra_info`.

    With the tokenizer of a `teacher`, messages are also rendered in its chat template, and the longer rendering counts
    for `max_prompt_length`.
    """

    def __init__(
        self,
        files: Files,
        tokenizer: PreTrainedTokenizerBase,
        options: PromptOptions,
        *,
        num_workers: int | None = 0,
        cache_dir: Path | None = None,
        kept: npt.NDArray[np.int64] | range | None = None,
        teacher: PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__(files, streaming=options.streaming)
        self._tokenizer, self._options, self._limit = tokenizer, options, options.max_prompt_length
        self._teacher = teacher
        for file in self.files:
            if problem := describe_missing_column(file, options.prompt_key, "prompt_key"):
                raise DataError(problem)
        rows = self.count_rows(options.max_samples)
        self.kept: npt.NDArray[np.int64] | range
        truncated, from_cache = 0, False
        if self.is_streamed:
            self.kept = range(rows)
        elif kept is not None:
            self.kept = kept
        else:
            counters = [
                TokenCounter(each, options.chat_template_kwargs) for each in (tokenizer, teacher) if each is not None
            ]
            measured = [
                measure_lengths(self.files, rows, options.prompt_key, counter, processes=num_workers, folder=cache_dir)
                for counter in counters
            ]
            from_cache = all(cached for _, cached in measured)
            self.kept, truncated = self._drop_overlong(np.max([lengths for lengths, _ in measured], axis=0))
        kept_rows = len(self.kept)
        self.report = DataReport(
            self.name, rows, rows - kept_rows, truncated, kept_rows, self._limit, from_cache, self.is_streamed
        )

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
        return self.bytes / self.total_rows

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
        values = [value for file in self.files for value in file.values(name)]
        return [values[row] for row in self.kept]

    def numbers(self, name: str) -> npt.NDArray[np.float64]:
        """Return a column of numbers, such as the difficulty of every prompt."""
        values = self.column(name)
        for row, value in zip(self.kept, values, strict=True):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise DataError(
                    f"{self.location(int(row))}, column '{name}': {value!r} is not a finite number, which "
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
                f"{self.name}: all {len(prompts)} prompts that were checked are longer than "
                f"data.max_prompt_length={self._limit}. Raise it"
            )
        return prompts

    def iter_fields(self, names: Sequence[str]) -> Iterator[tuple[int, Any, dict[str, Any]]]:
        """Yield the row, the prompt and other columns of every prompt, or of some prompts if the files are streamed."""
        key = self._options.prompt_key
        if self.is_streamed:
            numbers = [prompt.row for prompt in self.sample() if prompt is not None]
            rows = ((number, self.row(number)) for number in numbers)
        else:
            every = (row for file in self.files for row in file.values((key, *names)))
            kept = set(map(int, self.kept))
            rows = ((number, row) for number, row in enumerate(every) if number in kept)
        for number, row in rows:
            yield number, row.get(key), {name: row[name] for name in names if row.get(name) is not None}

    def sources(self) -> list[str]:
        """Return the `data_source` of every prompt; "" if a row has none."""
        names = ("data_source", "reward_model")
        rows = (row for file in self.files for row in file.values(names))
        sources = [resolve_data_source(*map(row.get, names)) for row in rows]
        return [sources[row] for row in self.kept]

    def __getitem__(self, index: int) -> Prompt | None:
        row = int(self.kept[index])
        fields = self.row(index)
        raw = fields.pop(self._options.prompt_key, None)
        is_filtered = self._options.filter_overlong and self.is_streamed
        if is_filtered and count_characters(raw) > self._limit * get_longest_token(self._tokenizer):
            return None  # without tokenizing it
        try:
            token_ids, teacher_token_ids = self._encode(raw)
        except PromptError as error:
            raise DataError(f"{self.location(row)}, column '{self._options.prompt_key}': {error}") from None
        longest = max(len(token_ids), len(teacher_token_ids or ()))
        if longest > self._limit:
            if is_filtered:
                return None
            if self._options.truncation == "error":
                raise DataError(self._explain_too_long(row, longest, 1))
            token_ids = truncate(token_ids, self._limit, self._options.truncation)
        try:
            reward_fields = extract_reward_fields(fields)
        except DataError as error:
            raise DataError(f"{self.location(row)}: {error}") from None
        return Prompt(row, token_ids, **reward_fields, raw=raw, teacher_token_ids=teacher_token_ids)

    def _encode(self, raw: Any) -> tuple[list[int], list[int] | None]:
        """Return the tokens of a prompt, for the policy and for a teacher with its own chat template."""
        kwargs = self._options.chat_template_kwargs
        [token_ids] = encode_prompts(self._tokenizer, [raw], kwargs)
        if self._teacher is None:
            return token_ids, None
        if isinstance(raw, str):  # rendered already
            return token_ids, token_ids
        [teacher_token_ids] = encode_prompts(self._teacher, [raw], kwargs)
        return token_ids, teacher_token_ids

    def row(self, index: int) -> dict[str, Any]:
        """Return all columns of the row of a prompt, as in its file."""
        file, local = self.locate(int(self.kept[index]))
        return file.row(local)

    def _drop_overlong(self, lengths: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], int]:
        """Return the rows to keep, and how many of them will be truncated."""
        rows = len(lengths)
        long = np.flatnonzero(lengths > self._limit)
        if not self._options.filter_overlong:
            if len(long) and self._options.truncation == "error":
                raise DataError(self._explain_too_long(int(long[0]), int(lengths[long[0]]), len(long)))
            return np.arange(rows), len(long)
        if len(long) == rows:
            raise DataError(
                f"{self.name}: all {rows:,} prompts are longer than data.max_prompt_length={self._limit} "
                f"(the shortest has {lengths.min()} tokens, the longest {lengths.max()}). "
                f"Set data.max_prompt_length={lengths.max()} to keep them all"
            )
        return np.delete(np.arange(rows), long), 0

    def _explain_too_long(self, row: int, length: int, count: int) -> str:
        where, fix = "", ", or data.truncation=left, right or middle"
        if self._teacher is not None:
            where, fix = " in the longer of the policy's and the teacher's chat template", ""
        return (
            f"{self.location(row)}: the prompt has {length} tokens{where}, more than "
            f"data.max_prompt_length={self._limit}"
            + (f", as do {count - 1} others" if count > 1 else "")
            + f". Raise it, or set data.filter_overlong_prompts=True{fix}"
        )


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
