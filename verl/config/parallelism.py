"""Checks of how models are spread over the train ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from verl.config.batch_sizes import count_group_devices, count_train_ranks, get_ulysses_size
from verl.config.features import list_optimizers
from verl.config.schema import Config, SftConfig
from verl.config.schema.actor import FsdpConfig, OptimConfig


def find_parallel_conflicts(config: Config | SftConfig) -> Iterator[str]:
    """Yield sizes of groups of ranks that do not fit the run, and settings that do not work with them."""
    ranks = count_train_ranks(config)
    yield from _find_ulysses_conflicts(config, ranks)
    for _, optim, section, fsdp in list_optimizers(config):
        yield from _find_expert_conflicts(section, fsdp, optim, ranks)
        key, size = f"{section}.fsdp_size", fsdp.fsdp_size
        if size == -1:
            continue
        if size == 0 or ranks % size:
            yield (
                f"{key}: {size} does not divide the {ranks} train ranks of the run (trainer.nnodes x "
                f"trainer.n_gpus_per_node), and -1 means all of them; set {key}={_nearest_divisor(ranks, size)}"
            )
        elif fsdp.stochastic_rounding and size != ranks:
            yield (
                f"{key}: {size} is not supported with {section}.stochastic_rounding=true: the copies of the model "
                f"would be rounded differently; set {key}=-1, or {section}.stochastic_rounding=false"
            )


def count_rank_multiple(config: Config | SftConfig) -> int:
    """Return the number of which the count of train ranks must be a multiple."""
    sharding = [fsdp for _, _, _, fsdp in list_optimizers(config)]
    sizes = [max(1, fsdp.fsdp_size) for fsdp in sharding] + [fsdp.expert_parallel_size for fsdp in sharding]
    return math.lcm(count_group_devices(config), get_ulysses_size(config), *sizes)


def _find_ulysses_conflicts(config: Config | SftConfig, ranks: int) -> Iterator[str]:
    size = get_ulysses_size(config)
    section = "model" if isinstance(config, SftConfig) else "actor_rollout_ref.actor"
    key = f"{section}.ulysses_sequence_parallel_size"
    if ranks % size:
        yield (
            f"{key}: {size} does not divide the {ranks} train ranks of the run (trainer.nnodes x "
            f"trainer.n_gpus_per_node); set {key}={_nearest_divisor(ranks, size)}"
        )
    if isinstance(config, SftConfig) or size == 1:
        return
    distillation = config.distillation
    if distillation.enable and distillation.mode == "loss" and distillation.teacher.use_own_chat_template:
        yield (
            f"{key}: {size} is not supported with distillation.mode=loss and "
            "distillation.teacher.use_own_chat_template=true: the ranks would have other tokens of the teacher than of "
            f"the policy; set {key}=1, or distillation.mode=reward"
        )


def _find_expert_conflicts(section: str, fsdp: FsdpConfig, optim: OptimConfig, ranks: int) -> Iterator[str]:
    key, size = f"{section}.expert_parallel_size", fsdp.expert_parallel_size
    copy = ranks if fsdp.fsdp_size < 1 else min(fsdp.fsdp_size, ranks)
    if copy % size:
        yield (
            f"{key}: {size} does not divide the {copy} ranks that share one copy of the model; set "
            f"{key}={_nearest_divisor(copy, size)}"
        )
    elif size > 1 and (optim.name == "adamw_8bit" or fsdp.stochastic_rounding):
        yield f"{key}: {size} is not supported with 8-bit moments or stochastic rounding; set {key}=1"


def _nearest_divisor(ranks: int, size: int) -> int:
    """Return the largest divisor of `ranks` that is at most `size`.

    >>> _nearest_divisor(8, 5)
    4
    """
    return max(divisor for divisor in range(1, max(1, min(size, ranks)) + 1) if ranks % divisor == 0)
