"""Handles of CUDA memory as plain data.

vLLM's messages carry numbers, bytes and lists, but neither the types nor the dtypes that torch's handles contain; it
would pickle them, which it allows only as "insecure serialization". Types and dtypes of packed buffers are constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl.errors import EngineError

_CONSTANTS = {0: torch.Tensor, 4: torch.storage.TypedStorage, 5: torch.uint8, 10: False}
"""Arguments of torch's `rebuild_cuda_tensor` by position: types of tensor and storage, dtype, requires_grad."""


def encode_handles(handles: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return handles, by device, without what is the same for every packed buffer."""
    return {device: [_encode(*item) for item in enumerate(handle)] for device, handle in handles.items()}


def decode_handles(handles: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of `rebuild_cuda_tensor`, by device."""
    return {device: tuple(_decode(*item) for item in enumerate(handle)) for device, handle in handles.items()}


def _encode(position: int, value: Any) -> Any:
    if position in _CONSTANTS:
        if value != _CONSTANTS[position]:
            raise EngineError(f"a handle of CUDA memory has {value} at position {position}, which is not supported")
        return None
    return list(value) if isinstance(value, tuple) else value  # sizes and strides


def _decode(position: int, value: Any) -> Any:
    return _CONSTANTS.get(position, tuple(value) if isinstance(value, list) else value)
