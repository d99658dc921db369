"""Inspection of data files as a run will see them: single rows, and a report on all of them.

With a tokenizer prompts are rendered and counted as in training; without one, messages are shown as written, and
lengths are in characters.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from verl.data.chat import encode, read_prompt, render
from verl.data.dataset import TRUTHS, extract_reward_fields
from verl.data.files import READ_AT_ONCE, JsonlRows, Rows, find_files, open_rows
from verl.data.validate import describe_missing_column, find_data_warnings
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class DataProblem:
    """A problem, its row count and first location, and a fix. A `fatal` one stops a run or fails its rewards."""

    text: str
    fix: str = ""  # unless the text has it
    fatal: bool = True


@dataclass(frozen=True, slots=True)
class RowPreview:
    """One row: the prompt as text and as tokens, and the arguments of a reward function.

    If the prompt cannot be used, `text` is empty and `error` gives the reason; without a tokenizer `token_ids` is None.
    """

    location: str
    text: str
    token_ids: list[int] | None
    data_source: str = ""
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class InspectionReport:
    """The result of a pass over all rows. `lengths` are those of usable prompts, in tokens or characters."""

    rows: int
    lengths: npt.NDArray[np.int64]
    sources: Counter[str]
    problems: list[DataProblem]


@dataclass(slots=True)
class _RowCounter:
    """Rows with one kind of problem: their count, the first of them, and its message."""

    count: int = 0
    first: int = 0
    message: str = ""

    def add(self, row: int, message: str = "") -> None:
        if not self.count:
            self.first, self.message = row, message
        self.count += 1


@dataclass(slots=True)
class _Findings:
    """The findings of a pass so far."""

    unreadable: _RowCounter = field(default_factory=_RowCounter)
    unusable: _RowCounter = field(default_factory=_RowCounter)
    blank: _RowCounter = field(default_factory=_RowCounter)
    no_ground_truth: _RowCounter = field(default_factory=_RowCounter)
    untemplated: _RowCounter = field(default_factory=_RowCounter)  # strings without the chat template
    duplicate: _RowCounter = field(default_factory=_RowCounter)
    sources: Counter[str] = field(default_factory=Counter)
    lengths: array[int] = field(default_factory=lambda: array("q"))
    prompts: dict[int, int] = field(default_factory=dict)  # hash of a prompt -> the first row that has it


class DataFiles:
    """Some Parquet or JSONL files, and how a run would read them. Read-only.

    `describe_scorer` names the scorer of a data source, or None; `explain_no_scorer` then describes the fix.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        prompt_key: str = "prompt",
        tokenizer: PreTrainedTokenizerBase | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        describe_scorer: Callable[[str], str | None],
        explain_no_scorer: Callable[[str], str],
    ) -> None:
        self.prompt_key, self.tokenizer = prompt_key, tokenizer
        self.describe_scorer, self._explain_no_scorer = describe_scorer, explain_no_scorer
        self._template_kwargs = dict(template_kwargs or {})
        self.files: list[Rows] = [open_rows(path) for path in find_files(files)]
        missing = {file.path: describe_missing_column(file, prompt_key, "prompt_key") for file in self.files}
        self._missing = {path: problem for path, problem in missing.items() if problem is not None}

        self.marks = [] if tokenizer is None else [mark for mark in tokenizer.get_added_vocab() if mark.strip()]
        # With a template that adds nothing, a message equals a string.
        probe = [{"role": "user", "content": "x"}]
        self._template_adds = tokenizer is not None and tokenizer.chat_template and self._render(probe) != "x"

    @property
    def unit(self) -> str:
        return "characters" if self.tokenizer is None else "tokens"

    def __len__(self) -> int:
        return sum(map(len, self.files))

    def describe_columns(self) -> dict[str, str]:
        """Return how each column is used."""
        columns = list(dict.fromkeys(column for file in self.files for column in file.columns))
        known = {
            "data_source": "selects the scorer, and is passed to it",
            "reward_model": "its ground_truth is passed to the scorer, its other fields as extra_info",
            "extra_info": "passed to the scorer",
        }
        truths = [] if "reward_model" in columns else [column for column in TRUTHS if column in columns][:1]
        known |= dict.fromkeys(truths, "the ground truth")
        known[self.prompt_key] = "the prompt"
        return {column: known.get(column, f"passed to the scorer as extra_info[{column!r}]") for column in columns}

    def row(self, row: int) -> RowPreview:
        """Return one row as training would see it, counted over all files."""
        if not 0 <= row < len(self):
            raise DataError(f"--row {row}: rows go from 0 to {len(self) - 1:,}")
        file, index = self._locate(row)
        location = file.location(index)
        try:
            fields = file.row(index)
            prompt = fields.pop(self.prompt_key, None)
            rewards = extract_reward_fields(fields)
        except DataError as error:
            return RowPreview(location, "", None, error=str(error))
        try:
            text = self._render(prompt)
        except DataError as error:
            return RowPreview(location, "", None, **rewards, error=str(error))
        return RowPreview(
            location, text, None if self.tokenizer is None else encode(self.tokenizer, [text])[0], **rewards
        )

    def inspect(self, *, max_prompt_length: int, long_ones_stop: bool, limit: int | None = None) -> InspectionReport:
        """Inspect all rows, or the first `limit`; `long_ones_stop`: whether a prompt that is too long stops a run."""
        found, rows = _Findings(), 0
        for file, chunk in self._chunks(limit):
            texts_or_none = [self._inspect_row(found, file, row, fields) for row, fields in enumerate(chunk, rows)]
            texts = [text for text in texts_or_none if text is not None]
            found.lengths.extend(map(len, texts if self.tokenizer is None else encode(self.tokenizer, texts)))
            rows += len(chunk)
        lengths = np.array(found.lengths, np.int64)
        problems = [DataProblem(problem) for problem in self._missing.values()]
        problems += [DataProblem(warning, fatal=not len(self)) for warning in find_data_warnings(self.files)]
        problems += self._list_problems(found)
        if self.tokenizer is not None and long_ones_stop and (count := int((lengths > max_prompt_length).sum())):
            problems.append(
                DataProblem(
                    f"{count:,} prompts are longer than data.max_prompt_length={max_prompt_length}",
                    f"set data.max_prompt_length={lengths.max()}, data.filter_overlong_prompts=True, or "
                    "data.truncation=left, right or middle",
                )
            )
        return InspectionReport(rows, lengths, found.sources, problems)

    def _inspect_row(self, found: _Findings, file: Rows, row: int, fields: dict[str, Any] | DataError) -> str | None:
        """Record the findings of one row; return the text of its prompt, if it is usable."""
        try:
            if isinstance(fields, DataError):
                raise fields
            prompt = fields.pop(self.prompt_key, None)
            rewards = extract_reward_fields(fields)
        except DataError as error:
            found.unreadable.add(row, str(error).removeprefix(f"{self._describe_row(row)}: "))
            return None
        found.sources[rewards["data_source"]] += 1
        if rewards["ground_truth"] is None:
            found.no_ground_truth.add(row)
        if file.path in self._missing:
            return None
        try:
            text = self._render(prompt)
        except DataError as error:
            found.unusable.add(row, str(error))
            return None
        if isinstance(prompt, str) and self._template_adds and not any(mark in text for mark in self.marks):
            found.untemplated.add(row)
        if _is_blank(prompt):
            found.blank.add(row)
        elif (first := found.prompts.setdefault(hash(text), row)) != row:
            found.duplicate.add(row, self._describe_row(first))
        return text

    def _list_problems(self, found: _Findings) -> Iterator[DataProblem]:
        if found.unreadable.count:
            yield DataProblem(f"{self._describe_rows(found.unreadable)}: {found.unreadable.message}")
        if found.unusable.count:
            yield DataProblem(f"{self._describe_rows(found.unusable)}: {found.unusable.message}")
        if found.blank.count:
            yield DataProblem(
                f"{self._describe_rows(found.blank)}: the prompt is blank", "fill it, or remove the row", fatal=False
            )
        for source in found.sources:
            if self.describe_scorer(source) is None:
                yield DataProblem(self._explain_no_scorer(source))
        if found.no_ground_truth.count:
            is_custom = not any(
                str(self.describe_scorer(source)).startswith("verl.rewards.") for source in found.sources
            )
            yield DataProblem(
                f"{self._describe_rows(found.no_ground_truth)}: no ground truth",
                'write it as reward_model: {"ground_truth": ...}, or into a column ground_truth or answer'
                + ("; the scorer gets None" if is_custom else ""),
                fatal=not is_custom,
            )
        if found.untemplated.count:
            yield DataProblem(
                f"{self._describe_rows(found.untemplated)}: the prompt is a string without special tokens, to which "
                "the chat template is not applied",
                'to apply it, write the prompt as [{"role": "user", "content": ...}]',
                fatal=False,
            )
        if found.duplicate.count:
            yield DataProblem(
                f"{self._describe_rows(found.duplicate)}: the prompt is a duplicate of {found.duplicate.message}",
                "remove one of them, unless it is intended",
                fatal=False,
            )

    def _describe_rows(self, rows: _RowCounter) -> str:
        first = self._describe_row(rows.first)
        return f"{rows.count:,} rows, the first {first}" if rows.count > 1 else first

    def _describe_row(self, row: int) -> str:
        file, index = self._locate(row)
        return file.location(index)

    def _locate(self, row: int) -> tuple[Rows, int]:
        for file in self.files:
            if row < len(file):
                break
            row -= len(file)
        return file, row

    def _render(self, prompt: Any) -> str:
        if self.tokenizer is not None:
            return render(self.tokenizer, prompt, self._template_kwargs)
        read = read_prompt(prompt)
        if isinstance(read, str):
            return read
        return "\n".join(f"{message['role']}: {message.get('content', '')}" for message in read)

    def _chunks(self, limit: int | None) -> Iterator[tuple[Rows, list[dict[str, Any] | DataError]]]:
        left = len(self) if limit is None else limit
        for file in self.files:
            for chunk in self._read(file):
                if left <= 0:
                    return
                yield file, chunk[:left]
                left -= len(chunk)

    def _read(self, file: Rows) -> Iterator[list[dict[str, Any] | DataError]]:
        """Read only the relevant columns of a Parquet file; a JSON line is read whole."""
        if isinstance(file, JsonlRows):
            for start in range(0, len(file), READ_AT_ONCE):
                yield [_row_or_error(file, index) for index in range(start, min(start + READ_AT_ONCE, len(file)))]
            return
        wanted = (self.prompt_key, "data_source", "reward_model", *TRUTHS)
        names = [column for column in file.columns if column in wanted] or file.columns[:1]
        for columns in zip(*(file.values(name) for name in names), strict=True):
            yield [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _row_or_error(file: Rows, index: int) -> dict[str, Any] | DataError:
    try:
        return file.row(index)
    except DataError as error:
        return error


def _is_blank(prompt: Any) -> bool:
    """Return whether the prompt has no content."""
    if isinstance(prompt, str):
        return not prompt.strip()
    return not any(str(message.get("content") or "").strip() or message.get("tool_calls") for message in prompt)
