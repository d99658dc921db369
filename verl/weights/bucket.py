"""Weights as an engine receives them: named as in a Hugging Face checkpoint, and in buckets of plain bytes.

A bucket is a buffer in host memory and a table of the tensors in it. transformers may hold in one tensor what a
checkpoint has in several, such as the experts of a mixture; `to_hf` and `load_hf` convert one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl.errors import EngineError

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
    indices: dict[str, dict[str, Tensor]] = {}  # of one parameter at a time, since they are larger than it
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
