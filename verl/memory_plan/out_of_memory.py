"""The settings that reduce the memory of train workers, for the message of an out-of-memory error."""

from __future__ import annotations

from collections.abc import Mapping

from verl.config.batch_sizes import uses_dynamic_batches
from verl.config.features import uses_critic
from verl.config.schema.actor import ActorConfig
from verl.config.schema.critic import CriticConfig
from verl.config.schema.root import Config
from verl.config.schema.sft import SftModelConfig
from verl.config.train_engines import get_train_engine
from verl.training.settings import CHUNK_POSITIONS

_OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload")


def rl_memory_advice(config: Config) -> str:
    model, actor, rollout = (
        config.actor_rollout_ref.model,
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
    )
    name = "ppo_max_token_len_per_gpu" if uses_dynamic_batches(config) else "ppo_micro_batch_size_per_gpu"
    limits = {f"actor_rollout_ref.actor.{name}": getattr(actor, name)}
    switches = {"actor_rollout_ref.model.enable_gradient_checkpointing": model.enable_gradient_checkpointing}
    switches |= list_offload_settings("actor_rollout_ref.actor", actor)
    if uses_critic(config):
        critic = config.critic
        limits |= {f"critic.{name}": value} if (value := getattr(critic, name)) else {}
        switches["critic.model.enable_gradient_checkpointing"] = critic.model.enable_gradient_checkpointing
        switches |= list_offload_settings("critic", critic)
    if config.distillation.enable:
        switches["distillation.teacher.param_offload"] = config.distillation.teacher.param_offload
    limits["actor_rollout_ref.model.logprob_chunk_size"] = model.logprob_chunk_size or CHUNK_POSITIONS
    limits["actor_rollout_ref.rollout.gpu_memory_utilization"] = rollout.gpu_memory_utilization
    return format_memory_advice(limits, switches)


def list_offload_settings(key: str, model: ActorConfig | CriticConfig | SftModelConfig) -> dict[str, bool]:
    """Return the offload settings of a model's training engine."""
    section = get_train_engine(model.strategy).section
    settings = getattr(model, section)
    is_on = getattr(settings, "offload_policy", False)
    return {
        f"{key}.{section}.{name}": is_on or getattr(settings, name) for name in _OFFLOADS if hasattr(settings, name)
    }


def format_memory_advice(limits: Mapping[str, float], switches: Mapping[str, bool]) -> str:
    """Name limits to decrease, with their values, and switches that are still off.

    >>> format_memory_advice({"data.micro_batch_size_per_gpu": 8}, {"model.enable_gradient_checkpointing": False})
    'Decrease data.micro_batch_size_per_gpu (now 8), or set model.enable_gradient_checkpointing=True.'
    """
    decrease = " or ".join(f"{name} (now {value:g})" for name, value in limits.items())
    enable = " or ".join(f"{name}=True" for name, is_on in switches.items() if not is_on)
    return f"Decrease {decrease}{f', or set {enable}' if enable else ''}."
