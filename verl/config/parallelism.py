"""Checks of how models are spread over the train ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from verl.config.batch_sizes import count_group_devices, count_train_ranks, get_ulysses_size
from verl.config.features import list_optimizers
from verl.config.schema import Config, SftConfig


def find_parallel_conflicts(config: Config | SftConfig) -> Iterator[str]:
    """Yield sizes of groups of ranks that do not fit the run, and settings that do not work with them."""
    ranks = count_train_ranks(config)
    yield from _find_ulysses_conflicts(config, ranks)
    for _, _, section, fsdp in list_optimizers(config):
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
    sizes = (max(1, fsdp.fsdp_size) for _, _, _, fsdp in list_optimizers(config))
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


def _nearest_divisor(ranks: int, size: int) -> int:
    """Return the largest divisor of `ranks` that is at most `size`.

    >>> _nearest_divisor(8, 5)
    4
    """
    return max(divisor for divisor in range(1, max(1, min(size, ranks)) + 1) if ranks % divisor == 0)
