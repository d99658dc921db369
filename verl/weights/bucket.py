"""Weights as plain bytes: a parcel is a stretch of host memory and a table of what lies where in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["TensorSlot", "WeightBucket", "pack", "unpack"]

_ALIGNMENT = 64  # bytes; so that a view of any dtype starts where the hardware likes it


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where one tensor lies in its parcel."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some tensors laid end to end in one buffer. Travels through the object store without a copy on the same node."""

    slots: tuple[TensorSlot, ...]
    data: npt.NDArray[np.uint8]


def pack(
    weights: Iterable[tuple[str, Tensor]], *, max_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[WeightBucket]:
    """Cut a stream of (name, tensor) into parcels of at most `max_bytes`; a larger tensor travels alone.

    `dtype` converts floating-point tensors on the way, so that an engine in bfloat16 is not sent twice the bytes.
    """
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        tensor = tensor.detach().to(device="cpu", dtype=dtype if tensor.is_floating_point() else None).contiguous()
        if pending and size + tensor.nbytes > max_bytes:
            yield _seal(pending)
            pending, size = [], 0
        pending.append((name, tensor))
        size += _aligned(tensor.nbytes)
    if pending:
        yield _seal(pending)


def unpack(slots: Iterable[TensorSlot], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a parcel as views of `data [bytes] uint8`; they live as long as that buffer."""
    for slot in slots:
        dtype = getattr(torch, slot.dtype)
        size = dtype.itemsize * int(np.prod(slot.shape, dtype=np.int64))
        yield slot.name, data[slot.offset : slot.offset + size].view(dtype).view(slot.shape)


def _seal(tensors: list[tuple[str, Tensor]]) -> WeightBucket:
    slots, offset = [], 0
    for name, tensor in tensors:
        slots.append(TensorSlot(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
        offset += _aligned(tensor.nbytes)
    data = np.empty(offset, np.uint8)
    for slot, (_, tensor) in zip(slots, tensors, strict=True):
        data[slot.offset : slot.offset + tensor.nbytes] = tensor.view(-1).view(torch.uint8).numpy()
    return WeightBucket(tuple(slots), data)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
