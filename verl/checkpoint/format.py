"""How a sharded state lies in a directory: cut as torch.distributed.checkpoint cuts it, and nothing that runs code.

directory/
  __0_0.distcp, __1_0.distcp, ...   a file a rank: the bare bytes of its parts of tensors, and values as JSON
  metadata.json                     every entry: type, shape, and where its chunks lie

torch's own metadata, values and tensors are pickles. Here there is nothing to unpickle, and metadata are checked before
they are used; bare bytes also take half of the processor's time.
`read_tensors` needs neither a process group nor a model.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from verl.checkpoint.files import ChecksummedFile, FileChecksum, make_directory, write
from verl.errors import CheckpointError

__all__ = [
    "METADATA",
    "Chunk",
    "Entry",
    "Loading",
    "Reader",
    "Saving",
    "Writer",
    "entries",
    "read_tensors",
    "read_values",
]

T = TypeVar("T")
METADATA = "metadata.json"
FORMAT = 2
SHARD = re.compile(r"__\d+_\d+\.distcp")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, or a plain value, and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in chunks; or a plain value, which has no type and one chunk."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def entries(directory: str | Path) -> dict[str, Entry]:
    """What lies in a directory of shards, by dotted name: `model.lm_head.weight`, `schedule.step`.

    Nothing in it is believed: files are shards beside it, chunks lie inside their files and fill their tensors.
    """
    path = Path(directory, METADATA)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {directory}: {error}; it was not written to its end. Resume from an earlier step"
        ) from error
    try:
        written = json.loads(text)
        if written["format"] != FORMAT:
            raise ValueError(f"format {written['format']!r} is of another version of verl, {FORMAT} is known here")
        found = {str(name): _entry(entry) for name, entry in written["entries"].items()}
        _check_places(found, Path(directory))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {path}: is damaged: {error!s}") from error
    return found


def read_tensors(directory: str | Path, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by the rest of their names, one at a time, in this process alone.

    >>> dict(read_tensors("global_step_20/actor", prefix="model."))["lm_head.weight"].shape
    torch.Size([64, 64])
    """
    for name, entry in entries(directory).items():
        if entry.dtype is not None and name.startswith(prefix):
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            for chunk in entry.chunks:
                _part(tensor, chunk.offsets, chunk.sizes).copy_(_read(Path(directory), entry, chunk))
            yield name.removeprefix(prefix), tensor


def read_values(directory: str | Path, prefix: str = "") -> dict[str, Any]:
    """Plain values by the rest of their names."""
    found = {}
    for name, entry in entries(directory).items():
        if entry.dtype is None and name.startswith(prefix):
            try:
                found[name.removeprefix(prefix)] = json.loads(_bytes(Path(directory), entry.chunks[0]))
            except (ValueError, RecursionError) as error:
                raise CheckpointError(f"checkpoint {directory}: {name} cannot be read: {error}") from error
    return found


class Writer(dcp.StorageWriter):
    """Writes this rank's shard, and as rank 0 the metadata. `sums` are of the files that this process wrote."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self.sums: dict[str, FileChecksum] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        assert checkpoint_id is None, "a writer is of one directory"

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        make_directory(self._directory)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"__{rank}_0.distcp") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """The bytes of all that the plan holds, one after the other."""
        name, results, start = str(plan.storage_data), [], 0
        with ChecksummedFile(self._directory / name) as file:
            for item in plan.items:
                data = planner.resolve_data(item)
                size = file.write(data.getbuffer() if isinstance(data, io.BytesIO) else _bytes_of(data))
                results.append(WriteResult(item.index, size, (name, start, size)))
                start += size
        self.sums[name] = file.sum
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The metadata, last: without it there is nothing to read."""
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        written = {name: _written(name, kind, places) for name, kind in metadata.state_dict_metadata.items()}
        text = json.dumps({"format": FORMAT, "entries": written})
        self.sums[METADATA] = write(self._directory / METADATA, text.encode())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Saving(DefaultSavePlanner):
    """Plain values become JSON."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        try:
            return io.BytesIO(json.dumps(object).encode())
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{write_item.index.fqn}: {object!r} cannot be kept in a checkpoint: {error}"
            ) from error


class Loading(DefaultLoadPlanner):
    """The inverse."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        *above, last = self.mappings[read_item.dest_index.fqn]
        target: Any = self.original_state_dict
        for key in above:
            target = target[key]
        try:
            target[last] = json.loads(value.getvalue())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{read_item.dest_index.fqn}: {error}") from error


class Reader(dcp.FileSystemReader):
    """Reads what this rank wants of a directory, whoever wrote it."""

    def __init__(self, directory: str | Path, found: Mapping[str, Entry]) -> None:
        super().__init__(directory)
        self._entries = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            state_dict_metadata={name: _torch_metadata(entry) for name, entry in self._entries.items()},
            storage_data={
                MetadataIndex(name, None if entry.dtype is None else chunk.offsets): chunk
                for name, entry in self._entries.items()
                for chunk in entry.chunks
            },
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Every chunk of the plan, cut to what is wanted of it."""
        for item in plan.items:
            name, chunk = item.storage_index.fqn, self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(_bytes(Path(self.path), chunk)))
                continue
            tensor = _read(Path(self.path), self._entries[name], chunk)
            target = planner.resolve_tensor(item).detach()
            target.copy_(_part(tensor, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        return _done(None)


def _written(name: str, kind: Any, places: Mapping[MetadataIndex, Any]) -> dict[str, Any]:
    """An entry as the metadata file holds it; a place is a file, and where in it so many bytes begin."""

    def chunk(offsets: Sequence[int] | None, sizes: Sequence[int]) -> list[Any]:
        return [list(offsets or ()), list(sizes), *places[MetadataIndex(name, offsets)]]

    if isinstance(kind, BytesStorageMetadata):
        return {"chunks": [chunk(None, ())]}
    return {
        "dtype": str(kind.properties.dtype).removeprefix("torch."),
        "shape": list(kind.size),
        "chunks": [chunk(box.offsets, box.sizes) for box in kind.chunks],
    }


def _torch_metadata(entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry.dtype is None:
        return BytesStorageMetadata()
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks)


def _entry(written: Mapping[str, Any]) -> Entry:
    chunks = tuple(
        Chunk(_numbers(offsets), _numbers(sizes), str(file), *_numbers([start, length]))
        for offsets, sizes, file, start, length in written["chunks"]
    )
    if "dtype" not in written:
        return Entry(None, (), chunks)
    dtype = getattr(torch, str(written["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{written['dtype']!r} is no type of torch")
    shape = _numbers(written["shape"])
    torch.empty(shape, dtype=dtype, device="meta")  # whether there can be such a tensor at all
    return Entry(dtype, shape, chunks)


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} must be whole numbers, 0 or more")
    return tuple(values)


def _check_places(found: Mapping[str, Entry], directory: Path) -> None:
    sizes: dict[str, int] = {}
    for name, entry in found.items():
        for chunk in entry.chunks:
            if chunk.file not in sizes:
                if not SHARD.fullmatch(chunk.file):
                    raise ValueError(f"{name}: {chunk.file!r} is not the name of a shard")
                path = directory / chunk.file
                if not path.is_file():
                    raise ValueError(f"{name}: {path} is not there")
                sizes[chunk.file] = path.stat().st_size
            if chunk.start + chunk.length > sizes[chunk.file]:
                end = chunk.start + chunk.length
                raise ValueError(f"{name}: ends at byte {end} of {chunk.file}, which has {sizes[chunk.file]}")
            if entry.dtype is not None and chunk.length != (needed := math.prod(chunk.sizes) * entry.dtype.itemsize):
                raise ValueError(f"{name}: {chunk.length} bytes, and {entry.dtype} {chunk.sizes} has {needed}")
            sides = zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
            if any(offset + size > whole for offset, size, whole in sides):
                raise ValueError(f"{name}: a chunk at {chunk.offsets} of {chunk.sizes} does not lie in {entry.shape}")
        boxes = sorted((chunk.offsets, chunk.sizes) for chunk in entry.chunks if math.prod(chunk.sizes))
        filled = sum(math.prod(sizes) for _, sizes in boxes)
        if filled != math.prod(entry.shape) or any(_meet(*each) for each in pairwise(boxes)):
            raise ValueError(f"{name}: its chunks do not fill {entry.shape}")


def _meet(a: tuple[Sequence[int], Sequence[int]], b: tuple[Sequence[int], Sequence[int]]) -> bool:
    """Whether two boxes, each its offsets and sizes, share an element."""
    return all(i < j + m and j < i + n for i, n, j, m in zip(*a, *b, strict=True))


def _bytes(directory: Path, chunk: Chunk) -> bytes:
    with (directory / chunk.file).open("rb") as file:
        file.seek(chunk.start)
        return file.read(chunk.length)


def _read(directory: Path, entry: Entry, chunk: Chunk) -> Tensor:
    tensor = torch.empty(chunk.sizes, dtype=entry.dtype, device="cpu")
    with (directory / chunk.file).open("rb") as file:
        file.seek(chunk.start)
        if (read := file.readinto(_bytes_of(tensor))) != chunk.length:
            raise CheckpointError(f"checkpoint {directory / chunk.file}: {chunk.length - read} bytes are gone from it")
    return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    """Its own, if it is contiguous and not on a device; else of a copy."""
    whole = tensor.detach().cpu().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # a single element counts as contiguous with any stride
    return flat.view(torch.uint8).numpy().data


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _part(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor
