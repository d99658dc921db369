"""Weights as an engine receives them: named as in a Hugging Face checkpoint, and in buckets of plain bytes.

A bucket is a buffer in host memory and a table of the tensors in it. Processes of one node share its buffer as a file
in memory; others receive it through the object store. transformers may hold in one tensor what a
checkpoint has in several, such as the experts of an MoE; `to_hf` and `load_hf` convert one parameter at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl.errors import EngineError
from verl.types import LocalShard

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


@dataclass(frozen=True, slots=True)
class SharedBucket:
    """A bucket in a `SharedBuffer` of another process on the same node, which keeps it open."""

    slots: tuple[TensorSlot, ...]
    path: str
    size: int

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        return np.memmap(self.path, np.uint8, "r", shape=(self.size,))


class SharedBuffer:
    """A file in memory that other processes of this user can map by its path.

    Its memory is used as far as it is written to, and freed when no process has it open or mapped any more, however
    they end.
    """

    def __init__(self, size: int) -> None:
        self._descriptor = os.memfd_create("verl-weights")
        os.truncate(self._descriptor, size)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.data: npt.NDArray[np.uint8] = np.memmap(self.path, np.uint8, "r+", shape=(size,))

    def close(self) -> None:
        os.close(self._descriptor)


@contextmanager
def share(bucket: WeightBucket | SharedBucket) -> Iterator[SharedBucket]:
    """Give a bucket to processes of this node that cannot see the object store."""
    if isinstance(bucket, SharedBucket):
        yield bucket
        return
    buffer = SharedBuffer(bucket.data.nbytes)
    try:
        buffer.data[:] = bucket.data
        yield SharedBucket(bucket.slots, buffer.path, bucket.data.nbytes)
    finally:
        buffer.close()


Allocate = Callable[[int], npt.NDArray[np.uint8]]


def allocate_memory(size: int) -> npt.NDArray[np.uint8]:
    return np.empty(size, np.uint8)


def pack(
    weights: Iterable[tuple[str, Tensor | LocalShard]],
    *,
    max_bytes: int,
    first_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    allocate: Allocate = allocate_memory,
) -> Iterator[WeightBucket]:
    """Pack (name, tensor) into buckets of at most `max_bytes`, the first of `first_bytes`.

    A larger tensor gets its own bucket.
    `dtype` converts floating-point tensors, not shards. `allocate` returns the buffer of a bucket, of which only the
    beginning may be used. Each tensor is copied before the next one is taken.
    """
    slots: list[TensorSlot] = []
    data, size, limit = allocate_memory(0), 0, first_bytes or max_bytes
    for name, tensor in weights:
        if isinstance(tensor, Tensor):
            tensor = tensor.detach().to(dtype if tensor.is_floating_point() else None)
        if slots and size + tensor.nbytes > limit:
            yield WeightBucket(tuple(slots), data[:size])
            slots, size, limit = [], 0, max_bytes
        if not slots:
            data = allocate(max(max_bytes, _align(tensor.nbytes)))
        slot = TensorSlot(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size)
        for _, target in unpack([slot], torch.from_numpy(data)):
            tensor.copy_to(target) if isinstance(tensor, LocalShard) else target.copy_(tensor)
        slots.append(slot)
        size += _align(tensor.nbytes)
    if slots:
        yield WeightBucket(tuple(slots), data[:size])


def unpack(slots: Iterable[TensorSlot], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket as views of `data [bytes] uint8`."""
    for slot in slots:
        dtype = getattr(torch, slot.dtype)
        size = dtype.itemsize * int(np.prod(slot.shape, dtype=np.int64))
        yield slot.name, data[slot.offset : slot.offset + size].view(dtype).view(slot.shape)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def to_hf(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of parameters as a checkpoint has them; views of the tensors where possible."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in weights:
        yield from revert_weight_conversion(model, {name: tensor}).items()


@torch.no_grad()
def load_hf(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write weights, by their names in a checkpoint, into the model's parameters.

    Where the conversion of a parameter returns copies instead of views, converting the numbers 0, 1, 2, ... in its
    place shows which elements they came from.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    targets: dict[str, tuple[str, Tensor | None]] = {}
    for name, tensor in parameters.items():
        for key, part in to_hf(model, [(name, tensor)]):
            is_view = part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            targets[key] = name, part if is_view else None
    indices: dict[
        str, dict[str, Tensor]
    ] = {}  # one parameter at a time: its indices need more memory than the parameter
    for key, weight in weights:
        name, view = targets[key]
        if view is not None:
            view.copy_(weight)
            continue
        if name not in indices:
            positions = torch.arange(parameters[name].numel(), device=parameters[name].device)
            indices = {name: dict(to_hf(model, [(name, positions.view(parameters[name].shape))]))}
        parameters[name].put_(indices[name][key], weight.to(parameters[name]))


def check_names(model: PreTrainedModel, path: str) -> None:
    """Raise for a model that has several parameters where its checkpoint has one: they are converted one at a time."""
    from transformers.core_model_loading import revert_weight_conversion

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    whole = revert_weight_conversion(model, weights)
    if odd := whole.keys() ^ dict(to_hf(model, weights.items())).keys():
        raise EngineError(
            f"model {path} ({model.config.model_type}): {sorted(odd)[0]} is made of several parameters; such a model "
            "cannot be synced or exported weight by weight, and is not supported"
        )
