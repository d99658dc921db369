"""Prompts that are given in Python become a data file, whatever they come in: lists, datasets, loaders of batches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.errors import DataError

__all__ = ["Prompts", "rows_of", "write_rows"]

Prompts = str | Path | Iterable[Any]
"""The path of a file; or an iterable of texts, conversations (lists of messages), rows with a "prompt", or batches of
these, as a DataLoader gives them."""


def write_rows(prompts: Prompts, path: Path) -> str:
    """The path of a file that holds the prompts: `path`, unless they are in a file already."""
    if isinstance(prompts, str | Path):
        return str(prompts)
    lines = [json.dumps(row, default=_plain) for row in rows_of(prompts)]
    if not lines:
        raise DataError("prompts: there are none; the iterable is empty, or was read to its end before")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def rows_of(prompts: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """One row a prompt, as data files have them.

    >>> list(rows_of(["1+1=", {"prompt": "1+2=", "answer": "3"}]))
    [{'prompt': '1+1='}, {'prompt': '1+2=', 'answer': '3'}]
    """
    for number, item in enumerate(prompts):
        if isinstance(item, str) or _is_conversation(item):
            yield {"prompt": item}
        elif isinstance(item, Mapping) and "prompt" in item:
            yield from _of_batch(item) if _is_batch(item["prompt"]) else [dict(item)]
        elif isinstance(item, Sequence):
            yield from rows_of(item)
        else:
            keys = f" with {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""
            raise DataError(
                f"prompts[{number}]: is a {type(item).__name__}{keys}; give texts, lists of messages "
                '({"role": ..., "content": ...}), or rows with a "prompt"'
            )


def _is_conversation(item: Any) -> bool:
    return _is_listed(item) and isinstance(item[0]["role"], str)


def _is_listed(item: Any) -> bool:
    """A conversation; or several of one length that a DataLoader has put together, message by message."""
    return isinstance(item, Sequence) and bool(item) and isinstance(item[0], Mapping) and "role" in item[0]


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and not _is_conversation(prompt)


def _of_batch(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    prompts = batch["prompt"][0]["role"] if _is_listed(batch["prompt"]) else batch["prompt"]
    for number in range(len(prompts)):
        yield {key: _at(value, number, key) for key, value in batch.items()}


def _at(column: Any, number: int, name: str) -> Any:
    """One row's part of a column; nested fields were put together one by one."""
    if isinstance(column, Mapping):
        return {key: _at(value, number, f"{name}.{key}") for key, value in column.items()}
    if _is_listed(column):
        return [_at(message, number, name) for message in column]
    if isinstance(column, Sequence) and column and isinstance(column[0], (list, tuple)):
        raise DataError(
            f"prompts: {name} holds lists, and a DataLoader that puts rows together mixes them up; give it "
            "collate_fn=list, or the dataset itself"
        )
    return column[number]


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch, as JSON has them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise DataError(f"prompts: {value!r} is a {type(value).__name__}, which no data file can hold; make text of it")
