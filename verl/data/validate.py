"""What can be seen to be wrong with data files before any row is read: all of it at once, each with its mend."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence

from verl.data.files import Rows, find_files, open_rows
from verl.errors import DataError

__all__ = ["PathLike", "describe_missing_column", "find_data_warnings", "find_file_problems", "list_entries"]

PathLike = str | os.PathLike[str]
LIKELY_PROMPTS = ("prompt", "question", "problem", "messages", "conversations", "query", "instruction", "input", "text")
LIKELY = {
    "prompt_key": LIKELY_PROMPTS,
    "curriculum_key": ("difficulty", "level"),
    "response_key": ("response", "answer", "completion", "output", "solution"),
    "messages_key": ("messages", "conversations", "conversation"),
    "tools_key": ("tools", "functions"),
}
HOLDS = {
    "prompt_key": "the prompts",
    "curriculum_key": "a number for each prompt, the easy ones low",
    "response_key": "the answers",
    "messages_key": "the conversations",
    "tools_key": "the tools of each conversation",
}
MOST_SHOWN = 5


def list_entries(files: PathLike | Sequence[PathLike]) -> list[PathLike]:
    """What a user wrote as a list: each is a path, or a pattern that stands for several."""
    return [files] if isinstance(files, str | os.PathLike) else list(files)


def find_file_problems(
    files: PathLike | Sequence[PathLike], keys: Mapping[str, str], *, weighted: bool = False
) -> list[str]:
    """All that is wrong with the files, in words.

    `keys` are the columns that must be there, by the setting that names each: {"prompt_key": "question"}. With
    `weighted`, every entry must have rows of its own.
    """
    problems: list[str] = []
    opened: list[Rows] = []
    for entry in list_entries(files):
        try:
            found = [open_rows(path) for path in find_files(entry)]
        except DataError as error:
            problems.append(str(error))
            continue
        opened += found
        if weighted and not sum(map(len, found)):
            problems.append(f"{entry}: no rows, and a weight in data.train_weights; fill it, or take both out")
    if not problems and not any(map(len, opened)):
        problems.append(f"{', '.join(str(file.path) for file in opened)}: no rows. Fill the file, or name another")
    for setting, column in keys.items():
        problems += _shortened(
            [wrong for file in opened if (wrong := describe_missing_column(file, column, setting, keys))]
        )
    return problems


def find_data_warnings(files: Sequence[Rows]) -> list[str]:
    """What works, but is probably not meant: files without rows, and files with other columns than the first."""
    return [*_shortened([f"{file.path} has no rows" for file in files if not len(file)]), *_unlike(files)]


def describe_missing_column(file: Rows, name: str, setting: str, keys: Mapping[str, str] | None = None) -> str | None:
    """What is said of a file without a column that it must have, one of `keys`."""
    if not len(file) or file.has(name):
        return None
    if keys is not None and "response_key" in keys and (talk := _conversations(file, keys["response_key"])):
        if setting == "response_key" and keys["prompt_key"] not in file.columns:
            return None  # said already, of the prompt
        return (
            f"column '{name}' not found in {file.path}; it has: {', '.join(file.columns)}. {talk} looks like whole "
            f"conversations: set data.messages_key={talk}"
        )
    likely = [column for column in LIKELY[setting] if column in file.columns]
    likely += difflib.get_close_matches(name, file.columns, n=1, cutoff=0.5)
    mend = f"Set data.{setting}={likely[0]}" if likely else f"Set data.{setting} to the one that holds {HOLDS[setting]}"
    return f"column '{name}' not found in {file.path}; it has: {', '.join(file.columns)}. {mend}"


def _conversations(file: Rows, response: str) -> str | None:
    """The column of whole conversations in a file that has no answers to prompts."""
    answers = {response, *LIKELY["response_key"]}.intersection(file.columns)
    return next((column for column in LIKELY["messages_key"] if column in file.columns and not answers), None)


def _unlike(files: Sequence[Rows]) -> list[str]:
    """Files with other columns than the first: a reward function finds them in some rows only."""
    full = [file for file in files if len(file)]
    odd = []
    for file in full[1:]:
        less = [column for column in full[0].columns if column not in file.columns]
        more = [column for column in file.columns if column not in full[0].columns]
        parts = [f"lacks {', '.join(less)}"] * bool(less) + [f"has {', '.join(more)} besides"] * bool(more)
        if parts:
            odd.append(f"{file.path} {' and '.join(parts)}, unlike {full[0].path.name}: rewards see what a row has")
    return _shortened(odd)


def _shortened(lines: list[str]) -> list[str]:
    return [*lines[:MOST_SHOWN], *([f"... and {len(lines) - MOST_SHOWN} more files"] if lines[MOST_SHOWN:] else [])]
