"""Weights in slices: a model is built on the meta device, and each rank reads its rows of the safetensors files.

transformers may hold in one parameter what a checkpoint has in several tensors, such as the experts of a layer. Each of
them is a strided view of the parameter, which follows from the conversion that exports it (`to_hf`). A model for
which this does not hold is loaded whole by every rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange

from verl.checkpoint.save import get_local_shard
from verl.errors import EngineError
from verl.models.hub import find_file, find_weights
from verl.models.model_folder import ADAPTER_CONFIG
from verl.weights.bucket import to_hf

CHUNK_ROWS = 4096


class SlicingError(Exception):
    """Why a model cannot be read in slices. It can still be loaded whole."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: its file and key, and the strided view of a parameter that it fills."""

    file: str
    key: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """The part of a stored tensor that a rank reads, and the strided view of its shard that the part fills."""

    source: StoredTensor
    index: tuple[slice, ...]
    shape: tuple[int, ...]
    offset: int


Sources = dict[str, list[StoredTensor]]
"""Name of a parameter or buffer -> the stored tensors that fill it."""


def find_files(path: str) -> dict[str, str]:
    """Return the keys of a model's safetensors files and the file of each; reads only names."""
    if find_file(path, ADAPTER_CONFIG) is not None:
        raise SlicingError("it is an adapter")
    try:
        return find_weights(path)
    except FileNotFoundError as error:
        raise SlicingError(str(error)) from error


def find_sources(hf: PreTrainedModel, files: Mapping[str, str]) -> Sources:
    """Return the stored tensors that fill each parameter and persistent buffer of a model on the meta device."""
    # What `from_pretrained` sets, for `to_hf`; without it, every call would search the model for conversions.
    conversions = get_model_conversion_mapping(hf, add_legacy=False)
    hf._weight_conversions = [each for each in conversions if not isinstance(each, PrefixChange)]  # type: ignore[assignment]
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in hf.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    sources: Sources = {}
    for key, tied in names.items():
        stored = {name: each for name in tied if (each := _locate(hf, name, tensors[key], files)) is not None}
        if not stored:
            raise SlicingError(f"{tied[0]} is not in its files under the name that it would be exported with")
        first, *others = stored.values()
        if not all(_is_equal(first, other) for other in others):
            raise SlicingError(f"{' and '.join(stored)} are tied, but differ in its files")
        sources |= {name: stored.get(name, first) for name in tied}
    return sources


def find_unused(hf: PreTrainedModel, files: Mapping[str, str], sources: Sources) -> list[str]:
    """Return the keys of a checkpoint that no parameter is made of, except those that transformers ignores."""
    ignored = [*(getattr(hf, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"]
    used = {stored.key for each in sources.values() for stored in each}
    return [key for key in files if key not in used and not any(re.search(pattern, key) for pattern in ignored)]


def _locate(hf: PreTrainedModel, name: str, tensor: Tensor, files: Mapping[str, str]) -> list[StoredTensor] | None:
    """Return the stored tensors of one parameter, None if a file lacks one of them."""
    whole = torch.empty_like(tensor, device="meta")
    storage, stored = whole.untyped_storage()._cdata, []
    with _KeepViews():
        views = list(to_hf(hf, [(name, whole)]))
    for key, view in views:
        if key not in files:
            return None
        if view.untyped_storage()._cdata != storage:
            raise SlicingError(f"{key} is not a slice of {name}")
        stored.append(StoredTensor(files[key], key, tuple(view.shape), view.stride(), int(view.storage_offset())))
    if sum(math.prod(each.shape) for each in stored) != whole.numel():
        raise SlicingError(f"the tensors in its files do not fill {name}")
    return stored


class _KeepViews(TorchFunctionMode):
    """Leaves views as they are where a conversion asks for contiguous copies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _is_equal(first: list[StoredTensor], second: list[StoredTensor]) -> bool:
    """Return whether two names of one parameter have the same values in the files, which is read in parts."""
    if len(first) != 1 or len(second) != 1 or first[0].shape != second[0].shape:
        return False
    with ExitStack() as stack:
        slices = [stack.enter_context(safe_open(each[0].file, "pt")).get_slice(each[0].key) for each in (first, second)]
        starts = range(0, first[0].shape[0], CHUNK_ROWS)
        return all(torch.equal(*(each[start : start + CHUNK_ROWS] for each in slices)) for start in starts)


def cut(stored: StoredTensor, row_size: int, start: int, stop: int) -> StoredSlice | None:
    """Return the part of a stored tensor in rows `start` to `stop` of its parameter, None if it has none there.

    A row of the parameter has `row_size` elements. The slice's offset counts from row `start`.
    """
    first, rest = divmod(stored.offset, row_size)
    axis = next((axis for axis, stride in enumerate(stored.strides) if stride == row_size), None)
    count = 1 if axis is None else stored.shape[axis]
    begin, end = max(first, start), min(first + count, stop)
    if begin >= end:
        return None
    index, shape = [slice(None)] * len(stored.shape), list(stored.shape)
    if axis is not None:
        index[axis], shape[axis] = slice(begin - first, end - first), end - begin
    return StoredSlice(stored, tuple(index), tuple(shape), (begin - start) * row_size + rest)


def cut_rows(sources: list[StoredTensor], shape: tuple[int, ...], start: int, stop: int) -> Iterator[StoredSlice]:
    """Yield what fills the rows from `start` to `stop` of a parameter of this shape."""
    for stored in sources:
        if (part := cut(stored, math.prod(shape[1:]), start, stop)) is not None:
            yield part


@torch.no_grad()
def fill(tensor: Tensor, sources: list[StoredTensor]) -> None:
    """Read this rank's rows of a parameter or buffer. Files are mapped only as long as one tensor needs them."""
    shard = get_local_shard(tensor)
    local, offsets = shard.tensor, shard.offsets
    assert local is not None
    if tuple(local.shape[1:]) != tuple(tensor.shape[1:]):
        raise EngineError(f"{sources[0].key}: only sharding of the first dimension can be filled from files")
    start, stop = (offsets[0], offsets[0] + len(local)) if local.ndim else (0, 1)
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for part in cut_rows(sources, tuple(tensor.shape), start, stop):
            name, key = part.source.file, part.source.key
            try:
                if name not in files:
                    files[name] = stack.enter_context(safe_open(name, "pt"))
                stored = files[name].get_slice(key)
                if tuple(stored.get_shape()) != part.source.shape:
                    raise EngineError(
                        f"{name}: {key} has shape {tuple(stored.get_shape())}, but the model's configuration needs "
                        f"{part.source.shape}; check that config.json belongs to these weights"
                    )
                values = stored[part.index] if part.index else files[name].get_tensor(key)
            except (OSError, SafetensorError) as error:
                raise EngineError(f"{name}: {key} cannot be read: {error}") from error
            view = local.as_strided(part.shape, part.source.strides, local.storage_offset() + part.offset)
            view.copy_(values)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Replace parameters on the meta device by uninitialized ones on `device`. Tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]


@torch.no_grad()
def compute_buffers(hf: PreTrainedModel) -> None:
    """Replace buffers on the meta device by real ones in host memory, with the values that the model computes itself.

    Parameters are left as they are: transformers skips those that are marked as initialized.
    """
    for parameter in hf.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    for module in hf.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
                module._is_hf_initialized = False  # type: ignore[assignment]
    hf.initialize_weights()
