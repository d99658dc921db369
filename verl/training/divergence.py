"""Detects training that has diverged: weights or gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.data.flat_batch import FlatBatch
from verl.training.tensors import group_by_mesh

PROBE_LENGTH = 16


def make_probe(vocabulary: int) -> FlatBatch:
    """Return one short sequence of tokens spread over the vocabulary, all but the first to be predicted."""
    tokens = torch.linspace(0, vocabulary - 1, PROBE_LENGTH).long()
    return FlatBatch(tokens, torch.tensor([0, PROBE_LENGTH]), torch.arange(PROBE_LENGTH) > 0)


def describe_nonfinite(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Name the tensors with NaN or infinity in the shards of any rank; empty without any. Collective."""
    shards = ((name, tensor.to_local() if isinstance(tensor, DTensor) else tensor) for name, tensor in parameters)
    held = {name: shard.detach() for name, shard in shards if shard.numel()}
    names: list[str] = []
    if held:
        largest = torch.stack([norm.float() for norm in torch._foreach_norm([*held.values()], float("inf"))])
        names = [name for name, is_finite in zip(held, largest.isfinite().tolist(), strict=True) if not is_finite]
    gathered = [names]
    if dist.is_initialized():
        gathered = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, names)
    names = list(dict.fromkeys(name for part in gathered for name in part))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"weights are not finite: {', '.join(names[:3])}{more}" if names else ""


def compute_norm(grads: list[Tensor]) -> float:
    """Return the norm of all gradients, over the shards of all ranks."""
    norms = [torch.nn.utils.get_total_norm(group) for group in group_by_mesh(grads)]
    return math.hypot(*(float(norm.full_tensor() if isinstance(norm, DTensor) else norm) for norm in norms))
