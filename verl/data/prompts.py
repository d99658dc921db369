"""Prompts given in Python become rows: from lists, datasets, tables, or loaders of batches."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.errors import DataError

Prompts = str | Path | Iterable[Any]
"""The path of a file; or an iterable of texts, conversations (lists of messages), rows with a "prompt", or batches of
these as a DataLoader yields them; or a table or dict of columns."""


MANY = 1_000_000
"""An iterable without a length that yields more rows than this is probably endless."""


def write_rows(prompts: Prompts, path: Path, most: int | None = None) -> str:
    """Write prompts to `path` and return it; prompts that are a file already are left there.

    An iterable without a length, which may be endless, is written up to `most` rows; others are written whole.
    """
    if isinstance(prompts, str | Path):
        return str(prompts)
    sized, count, draft = _has_length(prompts), 0, path.with_name(f".{path.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        for row in itertools.islice(iter_rows(prompts), None if sized else most):
            file.write(json.dumps(row, default=_to_json_value) + "\n")
            count += 1
            if count == MANY and not sized:
                warnings.warn(
                    f"prompts: {count:,} rows are written to {draft}, and there are more. If the iterable is endless, "
                    "set TrainingConfig(total_steps=...)",
                    stacklevel=2,
                )
    if not count:
        draft.unlink()
        raise DataError("prompts: the iterable is empty, or was already consumed")
    draft.replace(path)
    return str(path)


def _has_length(prompts: Iterable[Any]) -> bool:
    try:
        len(prompts)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def iter_rows(prompts: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield one row per prompt, as in data files. One text or one conversation is one prompt.

    >>> list(iter_rows(["1+1=", {"prompt": "1+2=", "answer": "3"}]))
    [{'prompt': '1+1='}, {'prompt': '1+2=', 'answer': '3'}]
    """
    for index, item in enumerate(_iter_items(prompts)):
        if _is_prompt(item):
            yield {"prompt": item}
        elif isinstance(item, Mapping) and "prompt" in item:
            is_batch = isinstance(item["prompt"], Sequence) and not _is_prompt(item["prompt"])
            yield from _split_batch(item, index) if is_batch else [dict(item)]
        elif isinstance(item, Sequence) and item:
            yield from iter_rows(item)
        else:
            keys = f" with {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""
            raise DataError(
                f"prompts[{index}] is a {type(item).__name__}{keys}; give texts, lists of messages "
                '({"role": ..., "content": ...}), or rows with a "prompt"'
            )


def _iter_items(prompts: Iterable[Any]) -> Iterable[Any]:
    """Return the items to iterate over. Iterating tables and dicts would yield the names of their columns."""
    if _is_prompt(prompts):
        return [prompts]
    if isinstance(prompts, Mapping):
        if "prompt" in prompts:
            return [prompts]
        names = [str(name) for name in prompts]
        raise DataError(
            f'prompts is a {type(prompts).__name__} with {", ".join(names) or "nothing"} but no "prompt"; '
            + (f"give one of them, such as prompts[{names[0]!r}], or " if names else "")
            + 'name the column of the prompts "prompt"'
        )
    if hasattr(prompts, "columns"):
        for method, arguments in _TABLES.items():
            if hasattr(prompts, method):
                return getattr(prompts, method)(*arguments)
    return prompts


_TABLES: dict[str, tuple[str, ...]] = {"to_dicts": (), "to_pylist": (), "to_dict": ("records",)}
"""The method that returns the rows of a table: of Polars, of Arrow, of pandas."""


def _is_prompt(item: Any) -> bool:
    return isinstance(item, str) or (_is_message_list(item) and isinstance(item[0]["role"], str))


def _is_message_list(item: Any) -> bool:
    """Return whether it is a conversation, or several of the same length that a DataLoader has collated."""
    return isinstance(item, Sequence) and bool(item) and isinstance(item[0], Mapping) and "role" in item[0]


def _split_batch(batch: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
    prompts = batch["prompt"][0]["role"] if _is_message_list(batch["prompt"]) else batch["prompt"]
    invalid = [item for item in prompts if not _is_prompt(item)]
    if invalid or not prompts:
        content = f"a list with a {type(invalid[0]).__name__}" if invalid else "an empty list"
        raise DataError(
            f'prompts[{index}]: its "prompt" is {content}; it must be a text, a list of messages '
            '({"role": ..., "content": ...}), or in a batch a list of these'
        )
    for row in range(len(prompts)):
        yield {key: _select(value, row, key) for key, value in batch.items()}


def _select(column: Any, row: int, name: str) -> Any:
    """Return one row of a collated column; nested fields were collated separately."""
    if isinstance(column, Mapping):
        return {key: _select(value, row, f"{name}.{key}") for key, value in column.items()}
    if _is_message_list(column):
        return [_select(message, row, name) for message in column]
    if isinstance(column, Sequence) and column and isinstance(column[0], (list, tuple)):
        raise DataError(
            f"prompts: {name} holds lists, which a DataLoader mixes up when it collates rows; give it collate_fn=list, "
            "or pass the dataset itself"
        )
    return column[row]


def _to_json_value(value: Any) -> Any:
    """Convert numbers and arrays of numpy and torch to JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise DataError(
        f"prompts: {value!r} is a {type(value).__name__}, which a data file cannot hold; convert it to text"
    )
