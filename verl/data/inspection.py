"""Data files as a run will see them: single rows, and what a pass over all of them finds.

With a tokenizer prompts are rendered and counted as in training; without one, what can be known without is told: the
messages as they are written, and lengths in characters.
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
from verl.data.columns import TRUTHS, extract_reward_fields
from verl.data.files import READ_AT_ONCE, JsonlRows, Rows, find_files, open_rows
from verl.data.validate import describe_missing_column, find_data_warnings
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DataFiles", "DataProblem", "InspectionReport", "RowPreview"]


@dataclass(frozen=True, slots=True)
class DataProblem:
    """What is wrong, in how many rows and where first; the mend. A `fatal` one stops a run, or fails its rewards."""

    what: str
    fix: str = ""  # where `what` does not say it
    fatal: bool = True


@dataclass(frozen=True, slots=True)
class RowPreview:
    """One row: the prompt as text and as tokens, and what a reward function is told.

    Where the prompt cannot be used, `text` is empty and `trouble` says why; without a tokenizer `token_ids` is None.
    """

    place: str
    text: str
    token_ids: list[int] | None
    data_source: str = ""
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class InspectionReport:
    """What a pass over all rows found. `lengths` are those of the prompts that can be used, in tokens or characters."""

    rows: int
    lengths: npt.NDArray[np.int64]
    sources: Counter[str]
    problems: list[DataProblem]


@dataclass(slots=True)
class _Tally:
    """Rows with one kind of trouble: how many, the first of them, and what was said there."""

    count: int = 0
    first: int = 0
    said: str = ""

    def add(self, row: int, said: str = "") -> None:
        if not self.count:
            self.first, self.said = row, said
        self.count += 1


@dataclass(slots=True)
class _Found:
    """What a pass has found so far."""

    unread: _Tally = field(default_factory=_Tally)
    unusable: _Tally = field(default_factory=_Tally)
    blank: _Tally = field(default_factory=_Tally)
    untold: _Tally = field(default_factory=_Tally)  # without a ground truth
    bare: _Tally = field(default_factory=_Tally)  # strings that no chat template was applied to
    again: _Tally = field(default_factory=_Tally)
    sources: Counter[str] = field(default_factory=Counter)
    lengths: array[int] = field(default_factory=lambda: array("q"))
    prompts: dict[int, int] = field(default_factory=dict)  # hash of a prompt -> the first row that has it


class DataFiles:
    """Some Parquet or JSONL files, and how a run would read them. Reads; changes nothing.

    `describe_scorer` names what scores the rows of a data source, or None; `explain_no_scorer` then says how to fix it.
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
        self.describe_scorer, self._no_scorer = describe_scorer, explain_no_scorer
        self._template_kwargs = dict(template_kwargs or {})
        self.files: list[Rows] = [open_rows(path) for path in find_files(files)]
        lacks = {file.path: describe_missing_column(file, prompt_key, "prompt_key") for file in self.files}
        self._lacking = {path: lack for path, lack in lacks.items() if lack is not None}

        self.marks = [] if tokenizer is None else [mark for mark in tokenizer.get_added_vocab() if mark.strip()]
        # A template that adds nothing to a message makes no difference between it and a string.
        probe = [{"role": "user", "content": "x"}]
        self._template_adds = tokenizer is not None and tokenizer.chat_template and self._text(probe) != "x"

    @property
    def unit(self) -> str:
        return "characters" if self.tokenizer is None else "tokens"

    def __len__(self) -> int:
        return sum(map(len, self.files))

    def uses(self) -> dict[str, str]:
        """Every column, and what becomes of it."""
        columns = list(dict.fromkeys(column for file in self.files for column in file.columns))
        known = {
            "data_source": "chooses the scorer, and is told to it",
            "reward_model": "its ground_truth is told to the scorer, and what else it holds as extra_info",
            "extra_info": "told to the scorer",
        }
        truths = [] if "reward_model" in columns else [column for column in TRUTHS if column in columns][:1]
        known |= dict.fromkeys(truths, "the ground truth")
        known[self.prompt_key] = "the prompt"
        return {column: known.get(column, f"told to the scorer as extra_info[{column!r}]") for column in columns}

    def row(self, number: int) -> RowPreview:
        """One row as training would see it, counted over all files."""
        if not 0 <= number < len(self):
            raise DataError(f"--row {number}: there are {len(self):,} rows, 0 to {len(self) - 1:,}")
        file, index = self._locate(number)
        place = file.place(index)
        try:
            fields = file.row(index)
            prompt = fields.pop(self.prompt_key, None)
            told = extract_reward_fields(fields)
        except DataError as error:
            return RowPreview(place, "", None, trouble=str(error))
        try:
            text = self._text(prompt)
        except DataError as error:
            return RowPreview(place, "", None, **told, trouble=str(error))
        return RowPreview(place, text, None if self.tokenizer is None else encode(self.tokenizer, [text])[0], **told)

    def inspect(self, *, max_prompt_length: int, long_ones_stop: bool, limit: int | None = None) -> InspectionReport:
        """A pass over all rows, or the first `limit`; `long_ones_stop` says whether a prompt too long stops a run."""
        found, rows = _Found(), 0
        for file, chunk in self._chunks(limit):
            noted = [self._note(found, file, row, fields) for row, fields in enumerate(chunk, rows)]
            texts = [text for text in noted if text is not None]
            found.lengths.extend(map(len, texts if self.tokenizer is None else encode(self.tokenizer, texts)))
            rows += len(chunk)
        lengths = np.array(found.lengths, np.int64)
        problems = [DataProblem(lack) for lack in self._lacking.values()]
        problems += [DataProblem(odd, fatal=not len(self)) for odd in find_data_warnings(self.files)]
        problems += self._problems(found)
        if self.tokenizer is not None and long_ones_stop and (count := int((lengths > max_prompt_length).sum())):
            problems.append(
                DataProblem(
                    f"{count:,} prompts are longer than data.max_prompt_length={max_prompt_length}",
                    f"set data.max_prompt_length={lengths.max()}, data.filter_overlong_prompts=True, or "
                    "data.truncation=left, right or middle",
                )
            )
        return InspectionReport(rows, lengths, found.sources, problems)

    def _note(self, found: _Found, file: Rows, row: int, fields: dict[str, Any] | DataError) -> str | None:
        """Take in one row; the text of its prompt, if it has one that can be used."""
        try:
            if isinstance(fields, DataError):
                raise fields
            prompt = fields.pop(self.prompt_key, None)
            told = extract_reward_fields(fields)
        except DataError as error:
            found.unread.add(row, str(error).removeprefix(f"{self._place(row)}: "))
            return None
        found.sources[told["data_source"]] += 1
        if told["ground_truth"] is None:
            found.untold.add(row)
        if file.path in self._lacking:
            return None
        try:
            text = self._text(prompt)
        except DataError as error:
            found.unusable.add(row, str(error))
            return None
        if isinstance(prompt, str) and self._template_adds and not any(mark in text for mark in self.marks):
            found.bare.add(row)
        if _is_blank(prompt):
            found.blank.add(row)
        elif (first := found.prompts.setdefault(hash(text), row)) != row:
            found.again.add(row, self._place(first))
        return text

    def _problems(self, found: _Found) -> Iterator[DataProblem]:
        if found.unread.count:
            yield DataProblem(f"{self._rows(found.unread)}: {found.unread.said}")
        if found.unusable.count:
            yield DataProblem(f"{self._rows(found.unusable)}: {found.unusable.said}")
        if found.blank.count:
            yield DataProblem(
                f"{self._rows(found.blank)}: the prompt is blank", "fill it, or remove the row", fatal=False
            )
        for source in found.sources:
            if self.describe_scorer(source) is None:
                yield DataProblem(self._no_scorer(source))
        if found.untold.count:
            own = not any(str(self.describe_scorer(source)).startswith("verl.rewards.") for source in found.sources)
            yield DataProblem(
                f"{self._rows(found.untold)}: there is no ground truth",
                'write it as reward_model: {"ground_truth": ...}, or into a column ground_truth or answer'
                + ("; as it is, the scorer is told None" if own else ""),
                fatal=not own,
            )
        if found.bare.count:
            yield DataProblem(
                f"{self._rows(found.bare)}: the prompt is a string without special tokens; the chat template is for "
                "messages, and is not applied to strings",
                'if the model is to be asked as in a chat, write [{"role": "user", "content": ...}] instead',
                fatal=False,
            )
        if found.again.count:
            yield DataProblem(
                f"{self._rows(found.again)}: the prompt is there already, {found.again.said}",
                "remove one of the two, unless it is meant: a test on training prompts tests what was learned by heart",
                fatal=False,
            )

    def _rows(self, tally: _Tally) -> str:
        place = self._place(tally.first)
        return f"{tally.count:,} rows, the first {place}" if tally.count > 1 else place

    def _place(self, number: int) -> str:
        file, index = self._locate(number)
        return file.place(index)

    def _locate(self, number: int) -> tuple[Rows, int]:
        for file in self.files:
            if number < len(file):
                break
            number -= len(file)
        return file, number

    def _text(self, prompt: Any) -> str:
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
        """Of a Parquet file only the columns that matter here; a line of JSON comes whole or not at all."""
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
    """Whether nobody says anything in it."""
    if isinstance(prompt, str):
        return not prompt.strip()
    return not any(str(message.get("content") or "").strip() or message.get("tool_calls") for message in prompt)
