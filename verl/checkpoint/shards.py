"""A directory of shards: one safetensors file per rank, and an index of what is stored where.

directory/
  shard-00001-of-00002.safetensors ...   each rank's parts of the tensors, by their dotted names
  metadata.json                          dtype, shape and parts of every tensor; plain values as JSON

Nothing is unpickled, and the index is validated before it is used. Reading needs neither a process group nor a model.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl.checkpoint.files import ChecksummedFile, FileChecksum, write
from verl.checkpoint.manifest import METADATA
from verl.errors import CheckpointError

FORMAT = 3
SHARD = re.compile(r"shard-\d{5,}-of-\d{5,}\.safetensors")
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""The names of types in safetensors files."""


class Part(NamedTuple):
    """A box of a tensor, and the shard that stores it under the tensor's name."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A whole tensor, and the parts that it is stored in."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The contents of a directory by dotted name: `model.lm_head.weight`, `schedule.step`."""

    tensors: dict[str, TensorEntry]
    values: dict[str, Any]

    def values_below(self, prefix: str) -> dict[str, Any]:
        """Return the plain values whose names start with `prefix`, by the rest of their names."""
        return {name.removeprefix(prefix): value for name, value in self.values.items() if name.startswith(prefix)}


def read_index(directory: str | Path) -> ShardIndex:
    """Return the index of a directory, validated: shards are inside the directory, and parts fill their tensors."""
    path = Path(directory, METADATA)
    if not path.parent.is_dir():
        raise CheckpointError(
            f"checkpoint {directory}: does not exist; the run that saved had no {path.parent.name}. Use the same "
            "algorithm, or start from the beginning with trainer.resume_mode=disable"
        )
    try:
        content = json.loads(path.read_bytes())
        if content["format"] == FORMAT:
            tensors = {str(name): _parse_entry(str(name), entry) for name, entry in content["tensors"].items()}
            return ShardIndex(tensors, dict(content["values"]))
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {directory}: {error}; the save did not finish. Resume from an earlier step"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {path}: is damaged: {error!s}") from error
    raise CheckpointError(
        f"checkpoint {directory}: has format {content['format']!r}, and this version of verl reads format {FORMAT}. "
        "Export it with the version that wrote it (verl merge) and train from that model, or start from the beginning "
        "with trainer.resume_mode=disable"
    )


def read_tensors(directory: str | Path, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors whose names start with `prefix`, by the rest of their names, one at a time.

    >>> dict(read_tensors("global_step_20/actor", prefix="model."))["lm_head.weight"].shape
    torch.Size([64, 64])
    """
    with ShardFiles(directory) as files:
        for name, entry in read_index(directory).tensors.items():
            if name.startswith(prefix):
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
                files.fill(tensor, (0,) * tensor.ndim, name, entry)
                yield name.removeprefix(prefix), tensor


def read_values(directory: str | Path, prefix: str = "") -> dict[str, Any]:
    """Return the plain values in a directory whose names start with `prefix`, by the rest of their names."""
    return read_index(directory).values_below(prefix)


class ShardFiles(ExitStack):
    """The shards of a directory, each opened when it is first needed."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__()
        self._directory = Path(directory)
        self._files: dict[str, Any] = {}

    def fill(self, target: Tensor, offsets: Sequence[int], name: str, entry: TensorEntry) -> None:
        """Copy into `target` the box of a stored tensor that begins at `offsets`."""
        for part in entry.parts:
            starts = [max(pair) for pair in zip(offsets, part.offsets, strict=True)]
            ends = [
                min(i + n, j + m) for i, n, j, m in zip(offsets, target.shape, part.offsets, part.sizes, strict=True)
            ]
            if all(start < end for start, end in zip(starts, ends, strict=True)):
                source = self._read(name, entry.dtype, part)
                _slice(target, offsets, starts, ends).copy_(_slice(source, part.offsets, starts, ends))

    def _read(self, name: str, dtype: torch.dtype, part: Part) -> Tensor:
        path = self._directory / part.file
        try:
            if part.file not in self._files:
                self._files[part.file] = self.enter_context(safe_open(path, "pt", device="cpu"))
            tensor: Tensor = self._files[part.file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint {path}: {name} cannot be read: {error}") from error
        if tensor.dtype != dtype or tuple(tensor.shape) != part.sizes:
            stored = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise CheckpointError(f"checkpoint {path}: {name} is {stored}, and {METADATA} has {dtype} {part.sizes}")
        return tensor


def shard_name(rank: int, count: int) -> str:
    return f"shard-{rank + 1:05d}-of-{count:05d}.safetensors"


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> FileChecksum:
    """Write a safetensors file without a copy of the tensors in memory; they are in order of their alignment."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{name}: {tensor.dtype} cannot be stored in a checkpoint")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with ChecksummedFile(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            file.write(_bytes_of(tensor))
    return file.checksum


def write_index(directory: Path, index: ShardIndex) -> FileChecksum:
    """Write the index, which goes last: without it there is nothing to read."""
    tensors = {
        name: {
            "dtype": str(entry.dtype).removeprefix("torch."),
            "shape": entry.shape,
            "parts": [part._asdict() for part in entry.parts],
        }
        for name, entry in index.tensors.items()
    }
    content = {"format": FORMAT, "tensors": tensors, "values": index.values}
    return write(directory / METADATA, json.dumps(content).encode())


def _parse_entry(name: str, content: Mapping[str, Any]) -> TensorEntry:
    dtype = getattr(torch, str(content["dtype"]), None)
    if dtype not in DTYPES:
        raise ValueError(f"{content['dtype']!r} is not a tensor type")
    shape = _parse_sizes(content["shape"])
    torch.empty(shape, dtype=dtype, device="meta")  # raises if there cannot be such a tensor
    parts = tuple(
        Part(_parse_sizes(part["offsets"]), _parse_sizes(part["sizes"]), str(part["file"])) for part in content["parts"]
    )
    for part in parts:
        if not SHARD.fullmatch(part.file):
            raise ValueError(f"{name}: {part.file!r} is not the name of a shard")
        sides = zip(part.offsets, part.sizes, shape, strict=True)
        if any(offset + size > whole for offset, size, whole in sides):
            raise ValueError(f"{name}: a part at {part.offsets} of {part.sizes} is not inside {shape}")
    boxes = sorted((part.offsets, part.sizes) for part in parts if math.prod(part.sizes))
    filled = sum(math.prod(sizes) for _, sizes in boxes)
    if filled != math.prod(shape) or any(_overlap(*pair) for pair in pairwise(boxes)):
        raise ValueError(f"{name}: its parts do not fill {shape}")
    return TensorEntry(dtype, shape, parts)


def _parse_sizes(values: Sequence[Any]) -> tuple[int, ...]:
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} must be whole numbers, 0 or more")
    return tuple(values)


def _overlap(a: tuple[Sequence[int], Sequence[int]], b: tuple[Sequence[int], Sequence[int]]) -> bool:
    """Return whether two boxes, each its offsets and sizes, share an element."""
    return all(i < j + m and j < i + n for i, n, j, m in zip(*a, *b, strict=True))


def _slice(tensor: Tensor, offsets: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    """Return the box from `starts` to `ends` of a tensor that itself begins at `offsets`."""
    sides = zip(offsets, starts, ends, strict=True)
    return tensor[tuple(slice(start - offset, end - offset) for offset, start, end in sides)]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host; of a copy otherwise."""
    whole = tensor.detach().cpu().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # a single element counts as contiguous with any stride
    return flat.view(torch.uint8).numpy().data
