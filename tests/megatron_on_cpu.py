"""Importing this module lets strategy=megatron train on a machine without accelerators: for tests.

A run uses it with `actor_rollout_ref.model.external_lib=tests.megatron_on_cpu`.
"""

import gc
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import torch.distributed as dist

from tests.cuda_stand_in import megatron_on_cpu
from verl.config import train_engines
from verl.training.engine import TrainEngine
from verl.training.megatron.settings import MegatronSettings

_spec = train_engines.get_train_engine("megatron")
train_engines._ENGINES["megatron"] = replace(_spec, engine=f"{__name__}:build_engine", needs_accelerators=False)


def build_engine(settings: MegatronSettings) -> TrainEngine:
    """Build an engine; from then on this process has the stand-in for CUDA. Processes without an engine do not."""
    _stand_in()
    from verl.training.megatron.engine import MegatronEngine

    return MegatronEngine(settings)


def leave_layout() -> None:
    """Destroy the process groups of a layout, so that the next engine of this process may have another one.

    Megatron-Core only forgets them, and gloo keeps three threads for each.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    gc.collect()  # engines, which refer to groups
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    gc.collect()


@cache
def _stand_in() -> ExitStack:
    stack = ExitStack()  # kept for the life of the process
    stack.enter_context(megatron_on_cpu())
    return stack
