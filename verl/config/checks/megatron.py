"""Checks of the settings of runs that train with Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Iterator

from verl.config.batch_sizes import count_train_ranks
from verl.config.checks.conflict import Conflict
from verl.config.features import TrainedModel, list_trained_models
from verl.config.schema import Config, SftConfig
from verl.config.schema.conditions import ACTOR, REF

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "context_parallel_size",
)


def find_conflicts(config: Config | SftConfig) -> Iterator[Conflict]:
    """Yield layouts that are not possible, and models whose layouts differ: Megatron-Core has one per process."""
    models = [model for model in list_trained_models(config) if model.settings.strategy == "megatron"]
    for model in models:
        yield from _check_ranks(model, count_train_ranks(config))
    if not models or not isinstance(config, Config):
        return
    actor = config.actor_rollout_ref.actor.megatron
    others = [("critic.megatron", config.critic.megatron)] if len(models) > 1 else []
    for section, layout in (*others, (f"{REF}.megatron", config.actor_rollout_ref.ref.megatron)):
        for name in SIZES:
            size, expected = getattr(layout, name), getattr(actor, name)
            if size not in (None, expected):
                reason = f"{size} and {ACTOR}.megatron.{name}={expected} cannot be combined: all models have one layout"
                yield Conflict(f"{section}.{name}", reason, f"={expected}")
    yield from _check_average(config)
    if config.distillation.enable and actor.expert_model_parallel_size > 1:
        reason = (
            f"{actor.expert_model_parallel_size} is not supported with a teacher, whose experts are not distributed"
        )
        yield Conflict(f"{ACTOR}.megatron.expert_model_parallel_size", reason, "=1")


def _check_ranks(model: TrainedModel, ranks: int) -> Iterator[Conflict]:
    layout, section = model.settings.megatron, f"{model.key}.megatron"
    pipeline, expert = layout.pipeline_model_parallel_size, layout.expert_model_parallel_size
    train_ranks = f"the {ranks} train ranks of the run (trainer.nnodes x trainer.n_gpus_per_node)"
    copies = {name: getattr(layout, name) for name in SIZES if name != "expert_model_parallel_size"}
    if ranks % math.prod(copies.values()):
        wrong = next((name for name, size in copies.items() if ranks % size), max(copies, key=copies.__getitem__))
        others = " x ".join(f"{name}={size}" for name, size in copies.items() if name != wrong)
        reason = f"{copies[wrong]} x {others} does not divide {train_ranks}"
        yield Conflict(f"{section}.{wrong}", reason, "=1, or change the number of ranks")
    elif ranks % (pipeline * expert):
        reason = f"{expert} x pipeline_model_parallel_size={pipeline} does not divide {train_ranks}"
        yield Conflict(f"{section}.expert_model_parallel_size", reason, "=1, or change the number of ranks")
    first_last = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    for name in first_last:
        layers = getattr(layout.override_transformer_config, name)
        if layers is not None and pipeline == 1:
            reason = f"{layers} needs {section}.pipeline_model_parallel_size of 2 or more"
            yield Conflict(f"{section}.override_transformer_config.{name}", reason, "=null")


def _check_average(config: Config) -> Iterator[Conflict]:
    """Check that small changes of an averaged reference, whose weights are those of the model, are not rounded away."""
    trainer, dtype = config.trainer, config.actor_rollout_ref.actor.megatron.dtype
    if trainer.ref_update_freq > 0 and trainer.ref_update_ratio < 1 and dtype != "float32":
        reason = f"{trainer.ref_update_ratio:g} is not supported with strategy=megatron in bfloat16"
        yield Conflict("trainer.ref_update_ratio", reason, f"=1, or {ACTOR}.megatron.dtype=float32")
