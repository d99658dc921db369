"""Builds the memory plan of a run from its settings, for `verl plan` and for the check before a run starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from verl.config.batch_sizes import (
    BatchSizes,
    count_data_ranks,
    count_engine_devices,
    count_sequence_ranks,
    count_train_ranks,
    get_actor_batch_sizes,
    get_critic_batch_sizes,
    get_max_sequence_tokens,
    uses_dynamic_batches,
)
from verl.config.features import frees_engine_memory
from verl.config.paths import change_settings
from verl.config.schema.actor import RefConfig
from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.root import Config
from verl.errors import ConfigError
from verl.memory_plan.accelerators import Device
from verl.memory_plan.device_memory import EngineMemory, MemoryPlan, TrainMemory
from verl.memory_plan.megatron_memory import MegatronMemory
from verl.memory_plan.model_memory import ModelMemory, PassSize
from verl.memory_plan.step_time import Cluster, Workload
from verl.models.model_folder import require_config
from verl.models.model_shape import ModelShape
from verl.training.fsdp.settings import FsdpSettings
from verl.training.megatron.settings import MegatronSettings
from verl.training.megatron.supported_models import find_problem
from verl.training.settings import EngineSettings

if TYPE_CHECKING:
    from verl.workers.train_settings import TrainSettings

BuildSettings = Callable[[Config, int, str], "TrainSettings"]
"""Returns the models of a train worker from settings, number of steps and device: the trainer's `train_settings`."""

DEVICE = "cuda"
_MANY_STEPS = 1_000_000  # the number of steps does not matter here


def plan_memory(config: Config, build: BuildSettings) -> MemoryPlan:
    """Return the memory of a run on accelerators, whatever trainer.device says."""
    config = change_settings(config, {"trainer.device": DEVICE})
    settings = build(config, config.trainer.total_training_steps or _MANY_STEPS, DEVICE)
    update, micro_batches = _update_size(config, get_actor_batch_sizes(config))
    models = {"actor": _model(config, settings.actor, update, micro_batches)}
    if settings.critic is not None:
        models["critic"] = _model(config, settings.critic, *_update_size(config, get_critic_batch_sizes(config)))
    if settings.prime is not None:
        models["prime"] = _model(config, settings.prime, update, micro_batches)
    frozen = {"reference": settings.reference, "prime reference": settings.prime_reference, "teacher": settings.teacher}
    models |= {name: _model(config, each, update, None) for name, each in frozen.items() if each is not None}
    return MemoryPlan(models, _engine(config), _reward_share(config))


def get_cluster(config: Config, device: Device) -> Cluster:
    """Return the machines of a run."""
    return Cluster(device, config.trainer.nnodes, config.trainer.n_gpus_per_node)


def has_shared_devices(config: Config) -> bool:
    """Return whether engines use the devices of train ranks, and not only their own."""
    return config.actor_rollout_ref.hybrid_engine or config.actor_rollout_ref.rollout.lend_train_devices


def get_workload(config: Config) -> Workload:
    """Return the sequences of a step, at their maximum length."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    sizes = get_actor_batch_sizes(config)
    return Workload(
        data.train_batch_size * rollout.n,
        data.max_prompt_length,
        data.max_response_length,
        sizes.epochs,
        updates=sizes.count_optimizer_steps(data.train_batch_size) // sizes.epochs,
    )


def _model(config: Config, settings: EngineSettings, update: PassSize, micro_batches: int | None) -> TrainMemory:
    content = require_config(settings.model_path)
    shape = ModelShape.from_config(content, settings.model_path, has_value_head=settings.head == "value")
    ranks = count_train_ranks(config)
    sizes: tuple[PassSize, PassSize | None, int]
    if micro_batches is None:  # a frozen model
        sizes = (_forward_size(config, config.actor_rollout_ref.ref, update), None, 2)
    else:
        sizes = (_forward_size(config, config.actor_rollout_ref.rollout, update), update, micro_batches)
    if isinstance(settings, MegatronSettings):
        if problem := find_problem(content, settings) or _find_ranks_problem(settings, ranks):
            raise ConfigError([problem])
        return MegatronMemory(shape, settings, ranks, *sizes)
    if not isinstance(settings, FsdpSettings):
        raise ConfigError([f"actor_rollout_ref.actor.strategy: the memory of {settings.engine} cannot be estimated"])
    return ModelMemory(shape, settings, ranks if settings.fsdp_size < 1 else settings.fsdp_size, *sizes)


def _find_ranks_problem(settings: MegatronSettings, ranks: int) -> str:
    """Return why ranks cannot be arranged in a layout; empty if they can."""
    stages = settings.pipeline_parallel_size
    for sizes in (
        {
            "tensor_model": settings.tensor_parallel_size,
            "context": settings.context_parallel_size,
            "pipeline_model": stages,
        },
        {"expert_model": settings.expert_parallel_size, "pipeline_model": stages},
    ):
        if ranks % math.prod(sizes.values()):
            product = " x ".join(f"{name}_parallel_size={size}" for name, size in sizes.items())
            return f"megatron: {product} does not divide {ranks} ranks"
    return ""


def _update_size(config: Config, sizes: BatchSizes) -> tuple[PassSize, int]:
    """Return the largest micro-batch of an update, and how many of them it has."""
    rollout, ranks = config.actor_rollout_ref.rollout, count_data_ranks(config)
    samples = -(-min(sizes.mini_batch, config.data.train_batch_size) * rollout.n // ranks)
    if sizes.micro_batch_samples is None:
        assert sizes.micro_batch_tokens is not None
        longest = get_max_sequence_tokens(config)
        return _by_tokens(config, sizes.micro_batch_tokens), -(-samples * longest // sizes.micro_batch_tokens)
    micro = min(sizes.micro_batch_samples, samples)
    return _by_samples(config, micro), -(-samples // micro)


def _forward_size(config: Config, section: RolloutConfig | RefConfig, update: PassSize) -> PassSize:
    """Return the largest micro-batch of a log-prob pass; as large as that of an update if the settings are null."""
    if uses_dynamic_batches(config):
        tokens = section.log_prob_max_token_len_per_gpu
        return update if tokens is None else _by_tokens(config, tokens * count_sequence_ranks(config))
    samples = section.log_prob_micro_batch_size_per_gpu
    return update if samples is None else _by_samples(config, samples)


def _by_samples(config: Config, samples: int) -> PassSize:
    return _on_rank(config, samples * get_max_sequence_tokens(config))


def _by_tokens(config: Config, tokens: int) -> PassSize:
    return _on_rank(config, max(tokens, get_max_sequence_tokens(config)))


def _on_rank(config: Config, tokens: int) -> PassSize:
    """Return the part of a micro-batch that one rank computes; several may share its tokens."""
    tokens = -(-tokens // count_sequence_ranks(config))
    longest = get_max_sequence_tokens(config)
    return PassSize(tokens, tokens * min(config.data.max_response_length, longest) // longest)


def _engine(config: Config) -> EngineMemory | None:
    rollout = config.actor_rollout_ref.rollout
    if not has_shared_devices(config):
        return None
    return EngineMemory(
        ModelShape.from_config(require_config(config.actor_rollout_ref.model.path)),
        share=rollout.gpu_memory_utilization,
        width=count_engine_devices(config),
        sleeps=frees_engine_memory(config, DEVICE),
        sequences=rollout.max_num_seqs,
        tokens=get_max_sequence_tokens(config),
    )


def _reward_share(config: Config) -> float:
    model = config.reward.reward_model
    return model.rollout.gpu_memory_utilization if model.enable else 0.0
