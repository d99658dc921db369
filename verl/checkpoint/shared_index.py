"""The index of a directory of shards, parsed by one rank for all of them.

An index has a line for every part of every tensor: parsing takes seconds at 64 ranks. Rank 0 parses it and sends it as
arrays, in which each rank finds the parts that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from verl.checkpoint.shards import Part, ShardIndex, TensorEntry, read_index
from verl.errors import CheckpointError, VerlError


@dataclass(frozen=True, slots=True)
class SharedEntry:
    """A whole tensor, and the parts that it is stored in: offsets and sizes [parts, dimensions], file [parts]."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    files: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SharedIndex:
    """The contents of a directory by dotted name, as in `ShardIndex`; `files` are the names of its shards."""

    tensors: dict[str, SharedEntry]
    values: dict[str, Any]
    files: list[str]

    def select(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> TensorEntry:
        """Return a tensor with only those parts that overlap the box at `offsets`."""
        entry = self.tensors[name]
        starts = np.maximum(entry.offsets, offsets)
        ends = np.minimum(entry.offsets + entry.sizes, np.add(offsets, sizes))
        rows = np.flatnonzero((starts < ends).all(axis=1))
        parts = (
            Part(tuple(entry.offsets[row].tolist()), tuple(entry.sizes[row].tolist()), self.files[entry.files[row]])
            for row in rows
        )
        return TensorEntry(entry.dtype, entry.shape, tuple(parts))

    def values_below(self, prefix: str) -> dict[str, Any]:
        """Return the plain values whose names start with `prefix`, by the rest of their names."""
        return {name.removeprefix(prefix): value for name, value in self.values.items() if name.startswith(prefix)}


def read_index_once(directory: str | Path) -> SharedIndex:
    """Return the index of a directory; all ranks call it together, and only rank 0 reads the file."""
    outcome: list[Any] = [None, ""]
    cause: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome = [_pack(_read(Path(directory))), ""]
        except VerlError as error:
            outcome, cause = [None, str(error)], error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    index, message = outcome
    if message:
        raise CheckpointError(message) from cause
    assert isinstance(index, SharedIndex)
    return index


def _read(directory: Path) -> ShardIndex:
    if not directory.is_dir():
        raise CheckpointError(
            f"checkpoint {directory}: does not exist; the run that saved had no {directory.name}. Use the same "
            "algorithm, or start from the beginning with trainer.resume_mode=disable"
        )
    return read_index(directory)


def _pack(index: ShardIndex) -> SharedIndex:
    files: dict[str, int] = {}
    tensors = {}
    for name, entry in index.tensors.items():
        shape = (len(entry.parts), len(entry.shape))
        tensors[name] = SharedEntry(
            entry.dtype,
            entry.shape,
            np.array([part.offsets for part in entry.parts], np.int64).reshape(shape),
            np.array([part.sizes for part in entry.parts], np.int64).reshape(shape),
            np.array([files.setdefault(part.file, len(files)) for part in entry.parts], np.int32),
        )
    return SharedIndex(tensors, index.values, list(files))
