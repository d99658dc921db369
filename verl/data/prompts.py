"""Prompts that are given in Python become rows, whatever they come in: lists, datasets, tables, loaders of batches."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.errors import DataError

__all__ = ["Prompts", "iter_rows", "write_rows"]

Prompts = str | Path | Iterable[Any]
"""The path of a file; or an iterable of texts, conversations (lists of messages), rows with a "prompt", or batches of
these, as a DataLoader gives them; or a table, or a dict, of columns."""


MANY = 1_000_000
"""So many rows of what has no length, and it is probably endless."""


def write_rows(prompts: Prompts, path: Path, most: int | None = None) -> str:
    """The path of a file that holds the prompts: `path`, unless they are in a file already.

    `most` are enough of what does not know its length, and may have no end; what does is written whole.
    """
    if isinstance(prompts, str | Path):
        return str(prompts)
    sized, count, draft = _knows_its_length(prompts), 0, path.with_name(f".{path.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        for row in itertools.islice(iter_rows(prompts), None if sized else most):
            file.write(json.dumps(row, default=_plain) + "\n")
            count += 1
            if count == MANY and not sized:
                warnings.warn(
                    f"prompts: {count:,} rows are written to {draft}, and there are more; if they have no end, say how "
                    "many are enough: TrainingConfig(total_steps=...)",
                    stacklevel=2,
                )
    if not count:
        draft.unlink()
        raise DataError("prompts: there are none; the iterable is empty, or was read to its end before")
    draft.replace(path)
    return str(path)


def _knows_its_length(prompts: Iterable[Any]) -> bool:
    try:
        len(prompts)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def iter_rows(prompts: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """One row a prompt, as data files have them. One text, or one conversation, is one prompt.

    >>> list(rows_of(["1+1=", {"prompt": "1+2=", "answer": "3"}]))
    [{'prompt': '1+1='}, {'prompt': '1+2=', 'answer': '3'}]
    """
    for number, item in enumerate(_items_of(prompts)):
        if _is_prompt(item):
            yield {"prompt": item}
        elif isinstance(item, Mapping) and "prompt" in item:
            yield from _of_batch(item, number) if _is_batch(item["prompt"]) else [dict(item)]
        elif isinstance(item, Sequence) and item:
            yield from iter_rows(item)
        else:
            keys = f" with {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""
            raise DataError(
                f"prompts[{number}]: is a {type(item).__name__}{keys}; give texts, lists of messages "
                '({"role": ..., "content": ...}), or rows with a "prompt"'
            )


def _items_of(prompts: Iterable[Any]) -> Iterable[Any]:
    """What is to be gone through one by one. Tables and dicts would give the names of their columns."""
    if _is_prompt(prompts):
        return [prompts]
    if isinstance(prompts, Mapping):
        if "prompt" in prompts:
            return [prompts]
        names = [str(name) for name in prompts]
        raise DataError(
            f'prompts: is a {type(prompts).__name__} with {", ".join(names) or "nothing"}, and no "prompt" among them; '
            + (f"give one of them, such as prompts[{names[0]!r}], or " if names else "")
            + 'call the column of the prompts "prompt"'
        )
    if hasattr(prompts, "columns"):
        for way, arguments in _TABLES.items():
            if hasattr(prompts, way):
                return getattr(prompts, way)(*arguments)
    return prompts


_TABLES: dict[str, tuple[str, ...]] = {"to_dicts": (), "to_pylist": (), "to_dict": ("records",)}
"""How a table gives its rows: that of Polars, of Arrow, of pandas."""


def _is_prompt(item: Any) -> bool:
    return isinstance(item, str) or _is_conversation(item)


def _is_conversation(item: Any) -> bool:
    return _is_listed(item) and isinstance(item[0]["role"], str)


def _is_listed(item: Any) -> bool:
    """A conversation; or several of one length that a DataLoader has put together, message by message."""
    return isinstance(item, Sequence) and bool(item) and isinstance(item[0], Mapping) and "role" in item[0]


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and not _is_prompt(prompt)


def _of_batch(batch: Mapping[str, Any], place: int) -> Iterator[dict[str, Any]]:
    prompts = batch["prompt"][0]["role"] if _is_listed(batch["prompt"]) else batch["prompt"]
    odd = [one for one in prompts if not _is_prompt(one)]
    if odd or not prompts:
        held = f"a list with a {type(odd[0]).__name__}" if odd else "an empty list"
        raise DataError(
            f'prompts[{place}]: its "prompt" is {held}; it must be a text, a list of messages '
            '({"role": ..., "content": ...}), or of a batch a list of such'
        )
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
