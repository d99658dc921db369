"""Weights as plain bytes: a bucket is a buffer in host memory and a table of the tensors in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes; aligns views of any dtype


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The position of one tensor in its bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Tensors in one buffer; the object store shares it without a copy on the same node."""

    slots: tuple[TensorSlot, ...]
    data: npt.NDArray[np.uint8]


def pack(
    weights: Iterable[tuple[str, Tensor]], *, max_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[WeightBucket]:
    """Pack (name, tensor) into buckets of at most `max_bytes`; a larger tensor gets its own.

    `dtype` converts floating-point tensors, so that an engine in bfloat16 is not sent twice the bytes.
    """
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        tensor = tensor.detach().to(device="cpu", dtype=dtype if tensor.is_floating_point() else None).contiguous()
        if pending and size + tensor.nbytes > max_bytes:
            yield _make_bucket(pending)
            pending, size = [], 0
        pending.append((name, tensor))
        size += _align(tensor.nbytes)
    if pending:
        yield _make_bucket(pending)


def unpack(slots: Iterable[TensorSlot], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket as views of `data [bytes] uint8`."""
    for slot in slots:
        dtype = getattr(torch, slot.dtype)
        size = dtype.itemsize * int(np.prod(slot.shape, dtype=np.int64))
        yield slot.name, data[slot.offset : slot.offset + size].view(dtype).view(slot.shape)


def _make_bucket(tensors: list[tuple[str, Tensor]]) -> WeightBucket:
    slots, offset = [], 0
    for name, tensor in tensors:
        slots.append(TensorSlot(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
        offset += _align(tensor.nbytes)
    data = np.empty(offset, np.uint8)
    for slot, (_, tensor) in zip(slots, tensors, strict=True):
        data[slot.offset : slot.offset + tensor.nbytes] = tensor.view(-1).view(torch.uint8).numpy()
    return WeightBucket(tuple(slots), data)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
