"""Expert parallelism: the experts of an MoE model are distributed over a group of ranks, and tokens are sent to them.

Without it, every rank gathers all experts of a layer, of which a token uses few. With it, a rank gathers only the
experts of its part, and computes the tokens of all ranks of the group that chose them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from verl.errors import EngineError
from verl.training.kernels.collectives import all_to_all


def distribute_experts(model: nn.Module, mesh: DeviceMesh, path: str) -> list[Any]:
    """Leave each rank of `mesh` its part of the experts of every layer; return the modules that hold them.

    Parameters are sharded along their first dimension, that of the experts, and may be on the meta device.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    if not layers:
        raise EngineError(f"model {path}: it is not an MoE, so there are no experts to distribute")
    for experts in layers:
        if experts.num_experts % mesh.size():
            raise EngineError(
                f"model {path}: {mesh.size()} ranks cannot share {experts.num_experts} experts evenly; set "
                "fsdp_config.expert_parallel_size to a divisor of them"
            )
        for name, weight in experts.named_parameters(recurse=False):
            shard = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(shard, requires_grad=weight.requires_grad))
        local = _LocalExperts(experts, mesh.size())
        experts.forward = partial(_dispatch, local, type(experts).forward, mesh.get_group())
    return layers


class _LocalExperts:
    """The module of a layer's experts as its forward pass sees it: only with the experts of this rank."""

    def __init__(self, experts: Any, ranks: int) -> None:
        self._experts, self.num_experts = experts, experts.num_experts // ranks

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to_local() if isinstance(value, DTensor) else value


def _dispatch(
    local: _LocalExperts,
    compute: Callable[..., Tensor],
    group: dist.ProcessGroup,
    states: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """Compute states [N, D] with the k `chosen` experts [N, k] of each, on the ranks that have them; weigh and add.

    Each row is sent once per expert, in the order of experts, and computed with weight 1.
    """
    ranks, top = group.size(), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    tokens = order // top
    sent = torch.bincount(chosen.flatten(), minlength=ranks * local.num_experts).view(ranks, -1)
    received = all_to_all(sent, group)  # [ranks, local experts]
    sends, receives = sent.sum(1).tolist(), received.sum(1).tolist()
    arrived = all_to_all(states[tokens], group, sends, receives)
    experts = torch.arange(local.num_experts, device=states.device).repeat(ranks).repeat_interleave(received.flatten())
    # One more row: experts without any tokens would have no gradients, and FSDP would not reduce those of others.
    arrived, experts = F.pad(arrived, (0, 0, 0, 1)), F.pad(experts, (0, 1))
    computed = compute(local, arrived, experts[:, None], arrived.new_ones(len(arrived), 1))[:-1]
    returned = all_to_all(computed, group, receives, sends) * weights.flatten()[order, None].to(computed.dtype)
    return torch.zeros_like(states).index_add(0, tokens, returned)
