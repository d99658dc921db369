"""Inspection of data files as a run will see them: single rows, and a report on all of them.

With a tokenizer prompts are rendered and counted as in training; without one, messages are shown as written, and
lengths are in characters.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from verl.data.chat import encode, read_prompt, render
from verl.data.dataset import TRUTHS, extract_reward_fields
from verl.data.files import READ_AT_ONCE, Files, FileSet, JsonlRows, Rows
from verl.data.special_tokens import get_special_text
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


_Fields: TypeAlias = "dict[str, Any] | DataError"
"""The columns of a row, or why it cannot be read."""


@dataclass(slots=True)
class _Findings:
    """The findings of a pass so far. A problem of rows has a kind: its rows are counted, and the first is described."""

    counts: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, tuple[int, str]] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)
    prompts: dict[int, int] = field(default_factory=dict)  # hash of a prompt -> the first row that has it

    def add(self, kind: str, row: int, text: str) -> None:
        self.counts[kind] += 1
        self.firsts.setdefault(kind, (row, text))


class DataInspector(FileSet):
    """Some Parquet or JSONL files, and how a run would read them. Read-only.

    `describe_scorer` names the scorer of a data source, or None; `explain_no_scorer` then describes the fix.
    """

    def __init__(
        self,
        files: Files,
        *,
        prompt_key: str = "prompt",
        tokenizer: PreTrainedTokenizerBase | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        describe_scorer: Callable[[str], str | None],
        explain_no_scorer: Callable[[str], str],
    ) -> None:
        super().__init__(files)
        self.prompt_key, self.tokenizer = prompt_key, tokenizer
        self.describe_scorer, self._explain_no_scorer = describe_scorer, explain_no_scorer
        self._template_kwargs = dict(template_kwargs or {})
        missing = {file.path: describe_missing_column(file, prompt_key, "prompt_key") for file in self.files}
        self._missing = {path: problem for path, problem in missing.items() if problem is not None}

        self.marks = [] if tokenizer is None else [mark for mark in tokenizer.get_added_vocab() if mark.strip()]
        # With a template that adds nothing, a message equals a string.
        probe = [{"role": "user", "content": "x"}]
        self._template_adds = tokenizer is not None and tokenizer.chat_template and self._render(probe) != "x"

    @property
    def unit(self) -> str:
        return "characters" if self.tokenizer is None else "tokens"

    def describe_columns(self) -> dict[str, str]:
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
        if not 0 <= row < self.total_rows:
            raise DataError(f"--row {row}: rows go from 0 to {self.total_rows - 1:,}")
        file, index = self.locate(row)
        location, rewards = file.location(index), {}
        try:
            fields = file.row(index)
            prompt = fields.pop(self.prompt_key, None)
            rewards = extract_reward_fields(fields)
            text = self._render(prompt)
        except DataError as error:
            return RowPreview(location, "", None, **rewards, error=str(error))
        if self.tokenizer is None:
            return RowPreview(location, text, None, **rewards)
        [token_ids] = encode(self.tokenizer, [text])
        return RowPreview(location, get_special_text(self.tokenizer).show(text), token_ids, **rewards)

    def inspect(
        self,
        *,
        max_prompt_length: int,
        is_overlong_fatal: bool,
        limit: int | None = None,
        seconds: float | None = None,
    ) -> InspectionReport:
        """Inspect all rows, or the first ones: `limit`, or as many as `seconds` allow.

        If `is_overlong_fatal`, a run stops at a prompt that is too long.
        """
        findings, counts, rows = _Findings(), array("q"), 0
        pending = islice(self._iter_rows(), limit)
        until = math.inf if seconds is None else time.monotonic() + seconds
        while (not rows or time.monotonic() < until) and (chunk := list(islice(pending, READ_AT_ONCE))):
            texts_or_none = [self._inspect_row(findings, row, *file_row) for row, file_row in enumerate(chunk, rows)]
            texts = [text for text in texts_or_none if text is not None]
            counts.extend(map(len, texts if self.tokenizer is None else encode(self.tokenizer, texts)))
            rows += len(chunk)
        lengths = np.array(counts, np.int64)
        problems = [DataProblem(problem) for problem in self._missing.values()]
        problems += [DataProblem(warning, fatal=not self.total_rows) for warning in find_data_warnings(self.files)]
        problems += self._list_problems(findings)
        if self.tokenizer is not None and is_overlong_fatal and (count := int((lengths > max_prompt_length).sum())):
            problems.append(
                DataProblem(
                    f"{count:,} prompts are longer than data.max_prompt_length={max_prompt_length}",
                    f"set data.max_prompt_length={lengths.max()}, data.filter_overlong_prompts=True, or "
                    "data.truncation=left, right or middle",
                )
            )
        return InspectionReport(rows, lengths, findings.sources, problems)

    def _inspect_row(self, findings: _Findings, row: int, file: Rows, fields: _Fields) -> str | None:
        """Record the findings of one row; return the text of its prompt, if it is usable."""
        try:
            if isinstance(fields, DataError):
                raise fields
            prompt = fields.pop(self.prompt_key, None)
            rewards = extract_reward_fields(fields)
        except DataError as error:
            findings.add("unreadable", row, str(error).removeprefix(f"{self.location(row)}: "))
            return None
        findings.sources[rewards["data_source"]] += 1
        if rewards["ground_truth"] is None:
            findings.add("no ground truth", row, "no ground truth")
        if file.path in self._missing:
            return None
        try:
            text = self._render(prompt)
        except DataError as error:
            findings.add("unusable", row, str(error))
            return None
        if isinstance(prompt, str) and self._template_adds and not any(mark in text for mark in self.marks):
            findings.add(
                "untemplated",
                row,
                "the prompt is a string without special tokens, to which the chat template is not applied",
            )
        if _is_blank(prompt):
            findings.add("blank", row, "the prompt is blank")
        elif (first := findings.prompts.setdefault(hash(text), row)) != row:
            findings.add("duplicate", row, f"the prompt is a duplicate of {self.location(first)}")
        return text

    def _list_problems(self, findings: _Findings) -> Iterator[DataProblem]:
        scorers = {source: self.describe_scorer(source) for source in findings.sources}
        is_custom = not any(str(scorer).startswith("verl.rewards.") for scorer in scorers.values())
        no_truth_fix = 'write it as reward_model: {"ground_truth": ...}, or into a column ground_truth or answer'
        kinds = {  # fix, and whether it is fatal
            "unreadable": ("", True),
            "unusable": ("", True),
            "blank": ("fill it, or remove the row", False),
            "no ground truth": (no_truth_fix + "; the scorer gets None" * is_custom, not is_custom),
            "untemplated": ('to apply it, write the prompt as [{"role": "user", "content": ...}]', False),
            "duplicate": ("remove one of them, unless it is intended", False),
        }
        for kind, (fix, fatal) in kinds.items():
            if count := findings.counts[kind]:
                row, text = findings.firsts[kind]
                first = f"{count:,} rows, the first " * (count > 1) + self.location(row)
                yield DataProblem(f"{first}: {text}", fix, fatal)
        for source, scorer in scorers.items():
            if scorer is None:
                yield DataProblem(self._explain_no_scorer(source))

    def _render(self, prompt: Any) -> str:
        if self.tokenizer is not None:
            return render(self.tokenizer, prompt, self._template_kwargs)
        read = read_prompt(prompt)
        if isinstance(read, str):
            return read
        return "\n".join(f"{message['role']}: {message.get('content', '')}" for message in read)

    def _iter_rows(self) -> Iterator[tuple[Rows, _Fields]]:
        """Yield the relevant columns of all rows; a JSON line is read whole, and one that is invalid is an error."""
        columns = tuple(dict.fromkeys((self.prompt_key, "data_source", "reward_model", *TRUTHS)))
        for file in self.files:
            if not isinstance(file, JsonlRows):
                yield from ((file, fields) for fields in file.values(columns))
                continue
            for index in range(len(file)):
                try:
                    yield file, file.row(index)
                except DataError as error:
                    yield file, error


def _is_blank(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return not prompt.strip()
    return not any(str(message.get("content") or "").strip() or message.get("tool_calls") for message in prompt)
