"""Rows of data files as Parquet can hold them: found out from all rows, before anything is paid for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from verl.data.dataset import PromptDataset

__all__ = ["ANSWERS", "ParquetWriter"]

ANSWERS = {
    "responses": pa.list_(pa.string()),
    "finish_reasons": pa.list_(pa.string()),
    "response_lengths": pa.list_(pa.int64()),
}
"""The columns that generation adds."""


class ParquetWriter:
    """All columns that any row has, each with one type. `notes` say what had to be written otherwise."""

    def __init__(self, dataset: PromptDataset) -> None:
        self.notes: list[str] = []
        self._columns: dict[str, tuple[pa.DataType, Callable[[Any], Any]]] = {}
        for name in dataset.names():
            if name in ANSWERS:
                self.notes.append(
                    f"column '{name}' of the files is left out: it is what the new answers are written to"
                )
            else:
                self._columns[name] = _fitting(dataset.column(name))
                if self._columns[name][1] is _as_text:
                    self.notes.append(f"column '{name}' holds values of several kinds, and is written as JSON text")
        self._schema = pa.schema({**{name: kind for name, (kind, _) in self._columns.items()}, **ANSWERS})

    def table(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        """Rows of the data, with their answers; a column that a row lacks is null."""
        held = [
            {**{name: how(row.get(name)) for name, (_, how) in self._columns.items()}, **{n: row[n] for n in ANSWERS}}
            for row in rows
        ]
        return pa.Table.from_pylist(held, schema=self._schema)


def _fitting(values: Sequence[Any]) -> tuple[pa.DataType, Callable[[Any], Any]]:
    """The type of a column, and what is done to each of its values."""
    for how in (_as_it_is, _without_empty):
        try:
            kind = pa.array([how(value) for value in values]).type
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            break
        if not _has_empty(kind):
            return kind, how
    return pa.string(), _as_text


def _as_it_is(value: Any) -> Any:
    return value


def _without_empty(value: Any) -> Any:
    """The same with None for {}, which Parquet cannot hold where no row has more in it."""
    if isinstance(value, Mapping):
        return {key: _without_empty(each) for key, each in value.items()} or None
    return [_without_empty(each) for each in value] if isinstance(value, list) else value


def _as_text(value: Any) -> str | None:
    return None if value is None else json.dumps(value, default=str)


def _has_empty(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind) and not kind.num_fields:
        return True
    return any(_has_empty(kind.field(number).type) for number in range(kind.num_fields))
