"""Checks of data files before any row is read: all problems at once, each with a fix."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from verl.data.files import Files, Rows, find_files, list_entries, open_rows
from verl.errors import DataError

PROMPTS = ("prompt", "question", "problem", "messages", "conversations", "query", "instruction", "input", "text")
RESPONSES = ("response", "answer", "completion", "output", "solution")
CONVERSATIONS = ("messages", "conversations", "conversation")
COLUMNS = {
    "prompt_key": ("the prompts", PROMPTS),
    "curriculum_key": ("a number for each prompt, low for easy ones", ("difficulty", "level")),
    "response_key": ("the responses", RESPONSES),
    "messages_key": ("the conversations", CONVERSATIONS),
    "tools_key": ("the tools of each conversation", ("tools", "functions")),
}
"""Setting -> the content of the column that it names, and likely names of that column."""
MOST_SHOWN = 5


def find_file_problems(files: Files, keys: Mapping[str, str], *, weighted: bool = False) -> list[str]:
    """Return all problems of the files, as messages.

    `keys` are the required columns by the setting that names each: {"prompt_key": "question"}. With `weighted`, every
    entry must have rows.
    """
    problems: list[str] = []
    opened: list[Rows] = []
    for entry in list_entries(files):
        try:
            files_of_entry = [open_rows(path) for path in find_files(entry)]
        except DataError as error:
            problems.append(str(error))
            continue
        opened += files_of_entry
        if weighted and not sum(map(len, files_of_entry)):
            problems.append(f"{entry}: no rows, but a weight in data.train_weights; fill the file, or remove both")
    if not problems and not any(map(len, opened)):
        problems.append(f"{', '.join(str(file.path) for file in opened)}: no rows; fill the file, or name another")
    for setting, column in keys.items():
        problems += _limit_lines(
            [problem for file in opened if (problem := describe_missing_column(file, column, setting, keys))]
        )
    return problems


def find_data_warnings(files: Sequence[Rows]) -> list[str]:
    """Return warnings about probable mistakes: files without rows, and files with other columns than the first."""
    return [
        *_limit_lines([f"{file.path} has no rows" for file in files if not len(file)]),
        *_find_column_mismatches(files),
    ]


def describe_missing_column(file: Rows, name: str, setting: str, keys: Mapping[str, str] | None = None) -> str | None:
    """Return the problem of a file that lacks a required column, or None."""
    if not len(file) or file.has(name):
        return None
    if keys is not None and "response_key" in keys and (talk := _find_conversations(file, keys["response_key"])):
        if setting == "response_key" and keys["prompt_key"] not in file.columns:
            return None  # reported with the prompt
        return (
            f"column '{name}' not found in {file.path}; it has: {', '.join(file.columns)}. {talk} looks like whole "
            f"conversations: set data.messages_key={talk}"
        )
    content, names = COLUMNS[setting]
    likely = [column for column in names if column in file.columns]
    likely += difflib.get_close_matches(name, file.columns, n=1, cutoff=0.5)
    fix = f"Set data.{setting}={likely[0]}" if likely else f"Set data.{setting} to the column with {content}"
    return f"column '{name}' not found in {file.path}; it has: {', '.join(file.columns)}. {fix}"


def _find_conversations(file: Rows, response: str) -> str | None:
    """Return the column of whole conversations in a file without responses."""
    responses = {response, *RESPONSES}.intersection(file.columns)
    return next((column for column in CONVERSATIONS if column in file.columns and not responses), None)


def _find_column_mismatches(files: Sequence[Rows]) -> list[str]:
    """Describe files with other columns than the first: a reward function gets them for some rows only."""
    full = [file for file in files if len(file)]
    warnings = []
    for file in full[1:]:
        missing = [column for column in full[0].columns if column not in file.columns]
        extra = [column for column in file.columns if column not in full[0].columns]
        parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"also has {', '.join(extra)}"] * bool(extra)
        if parts:
            warnings.append(
                f"{file.path} {' and '.join(parts)}, unlike {full[0].path.name}; reward functions get the columns of "
                "each row"
            )
    return _limit_lines(warnings)


def _limit_lines(lines: list[str]) -> list[str]:
    return [*lines[:MOST_SHOWN], *([f"... and {len(lines) - MOST_SHOWN} more files"] if lines[MOST_SHOWN:] else [])]
