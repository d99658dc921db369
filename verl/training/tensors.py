"""What all training engines need to know about tensors: their data type, and the devices that they are spread over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.errors import EngineError


def group_by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors by mesh: operations on several sharded tensors at once need them on the same one."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def parse_dtype(name: str) -> torch.dtype:
    """Return torch's floating-point type of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise EngineError(f"dtype: {name!r} is not a floating-point dtype; use float32 or bfloat16")
    return dtype
