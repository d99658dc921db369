"""The process groups of Megatron-Core, which it keeps in module globals: one layout per process."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from verl.errors import EngineError
from verl.training.megatron.settings import MegatronSettings
from verl.training.process_group import check_divides, get_timeout

INIT_SEED = 1
"""Megatron wants a seed before it creates a model; its weights are then read from files, and nothing is dropped out."""


class Sizes(NamedTuple):
    """The sizes that all models of a process share."""

    tensor: int
    pipeline: int
    expert: int
    context: int


_joined: tuple[dist.ProcessGroup, Sizes] | None = None


def join_groups(settings: MegatronSettings) -> None:
    """Create the groups of a model, or check that those of an earlier model suit it. Collective."""
    global _joined
    sizes = Sizes(
        settings.tensor_parallel_size,
        settings.pipeline_parallel_size,
        settings.expert_parallel_size,
        settings.context_parallel_size,
    )
    world, ranks = dist.group.WORLD, dist.get_world_size()
    assert world is not None
    check_divides(
        "tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size",
        sizes.tensor * sizes.pipeline * sizes.context,
        ranks,
    )
    check_divides("pipeline_model_parallel_size * expert_model_parallel_size", sizes.pipeline * sizes.expert, ranks)
    if _joined is not None and _joined[0] is world and parallel_state.model_parallel_is_initialized():
        if _joined[1] != sizes:
            raise EngineError(
                f"{settings.role}: the models of a run must have the same Megatron layout in one process, but this one "
                f"has {sizes} and an earlier one {_joined[1]}; give all of them the same megatron.*_parallel_size"
            )
        return
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        expert_model_parallel_size=sizes.expert,
        context_parallel_size=sizes.context,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=get_timeout().total_seconds() / 60,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(INIT_SEED)
    _joined = world, sizes


def last_stage_rank() -> int:
    """Return the rank of this rank's pipeline that has the last stage."""
    return dist.get_global_rank(parallel_state.get_pipeline_model_parallel_group(), pipeline_size() - 1)


def pipeline_size() -> int:
    size: int = parallel_state.get_pipeline_model_parallel_world_size()
    return size


def add_bytes(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add a contiguous tensor over ranks of which one at most has values other than 0, to the bit. Collective."""
    dist.all_reduce(tensor.view(-1).view(torch.uint8), group=group)
