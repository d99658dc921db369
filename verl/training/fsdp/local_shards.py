"""The shard of every weight that a rank has, for buckets that all ranks of a machine write together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from verl.checkpoint.save import get_local_shard
from verl.types import LocalShard
from verl.weights.bucket import to_hf


def find_plain_names(hf: PreTrainedModel) -> dict[str, str] | None:
    """Return the name in a checkpoint of each parameter; None if one is not stored as it is, or not split by rows."""
    names = {}
    for name, parameter in hf.named_parameters():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        stored = list(to_hf(hf, [(name, whole)]))
        if len(stored) != 1 or not _is_same(stored[0][1], whole) or not _is_in_rows(parameter):
            return None
        names[name] = stored[0][0]
    return names


def iter_shards(model: nn.Module, names: Mapping[str, str], dtype: torch.dtype) -> Iterator[tuple[str, LocalShard]]:
    """Yield the shard of each weight that this rank has to write, by its name in a checkpoint.

    Layers first, embeddings last: a large weight in the first bucket would keep the engines waiting.
    """
    for name, parameter in reversed(list(model.named_parameters())):
        shard = get_local_shard(parameter)
        yield names[name], replace(shard, tensor=shard.tensor if _is_writer(parameter) else None, dtype=dtype)


def _is_same(stored: Tensor, whole: Tensor) -> bool:
    is_view = stored.untyped_storage()._cdata == whole.untyped_storage()._cdata
    return is_view and stored.shape == whole.shape and stored.stride() == whole.stride()


def _is_in_rows(parameter: Tensor) -> bool:
    """Whether each rank has consecutive rows, or all of them."""
    if not isinstance(parameter, DTensor):
        return True
    shards = [placement for placement in parameter.placements if not placement.is_replicate()]
    return not shards or (len(shards) == 1 and type(shards[0]) is Shard)


def _is_writer(parameter: Tensor) -> bool:
    """Whether this rank is the first of those that have the same shard."""
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == 0
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    return all(
        at == 0 for at, placement in zip(coordinate, parameter.placements, strict=True) if placement.is_replicate()
    )
