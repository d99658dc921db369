"""Checks of the settings of a run against what its training engine supports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from verl.config.batch_sizes import count_train_ranks, get_ulysses_size
from verl.config.checks.conflict import Conflict
from verl.config.features import list_adapters, list_optimizers, uses_critic
from verl.config.paths import format_value
from verl.config.schema import Config, SftConfig
from verl.config.schema.conditions import ACTOR
from verl.config.train_engines import Capability, TrainEngineSpec, get_train_engine, list_train_engines

_USE_SQUARES = ("optimal_token_baseline", "tir_optimal_token_baseline")


class Need(NamedTuple):
    """A setting that requires a capability of the engine, unless it has another value."""

    capability: Capability
    key: str
    value: Any
    otherwise: Any


def find_conflicts(config: Config | SftConfig) -> Iterator[Conflict]:
    """Yield settings that need what the training engine does not support, and engines that cannot be combined."""
    for section, spec, needs in _list_models(config):
        yield from check_capabilities(spec, f"{section}.strategy", needs)
    if isinstance(config, Config) and uses_critic(config):
        actor, critic = config.actor_rollout_ref.actor.strategy, config.critic.strategy
        if actor != critic:
            reason = f"{critic} and {ACTOR}.strategy={actor} cannot be combined: both models get the same batches"
            yield Conflict("critic.strategy", reason, f"={actor}")


def check_capabilities(spec: TrainEngineSpec, key: str, needs: Iterator[Need]) -> Iterator[Conflict]:
    """Yield what an engine, chosen by the setting `key`, would need to support, and how to do without."""
    for need in needs:
        if need.capability in spec.capabilities:
            continue
        others = [name for name in list_train_engines(supporting=need.capability) if name != spec.name]
        fix = f"={format_value(need.otherwise)}" + (f", or {key}={others[0]}" if others else "")
        yield Conflict(need.key, f"{format_value(need.value)} is not supported by the training engine {spec.name}", fix)


def _list_models(config: Config | SftConfig) -> Iterator[tuple[str, TrainEngineSpec, Iterator[Need]]]:
    if isinstance(config, SftConfig):
        spec = get_train_engine(config.model.strategy)
        yield "model", spec, _find_common_needs(config, spec)
        return
    actor = get_train_engine(config.actor_rollout_ref.actor.strategy)
    yield ACTOR, actor, _find_common_needs(config, actor)
    yield ACTOR, actor, _find_policy_needs(config)
    if uses_critic(config):
        critic = get_train_engine(config.critic.strategy)
        yield "critic", critic, iter([Need("value_head", "critic.enable", True, False)])
        yield "critic", critic, _find_common_needs(config, critic, 1)


def _find_common_needs(config: Config | SftConfig, spec: TrainEngineSpec, index: int = 0) -> Iterator[Need]:
    """Yield the needs of a trained model: the policy, or the model of supervised fine-tuning, is at index 0."""
    optim_key, optim, key, fsdp = list_optimizers(config)[index]
    peft_key, peft = list_adapters(config)[index]
    ranks, model_key = count_train_ranks(config), "model" if isinstance(config, SftConfig) else ACTOR
    if ranks > 1:
        yield Need("many_ranks", "trainer.n_gpus_per_node", config.trainer.n_gpus_per_node, 1)
    if index == 0 and (size := get_ulysses_size(config)) > 1:
        yield Need("sequence_parallel", f"{model_key}.ulysses_sequence_parallel_size", size, 1)
    if peft.lora_rank > 0:
        yield Need("adapters", f"{peft_key}.lora_rank", peft.lora_rank, 0)
    if optim.name != "adamw":
        yield Need(optim.name, f"{optim_key}.name", optim.name, "adamw")
    if spec.section != key.rpartition(".")[2]:  # these settings have no effect on the engine
        return
    if fsdp.model_dtype == "bfloat16":
        yield Need("bfloat16_weights", f"{key}.model_dtype", fsdp.model_dtype, "float32")
    if fsdp.stochastic_rounding:
        yield Need("stochastic_rounding", f"{key}.stochastic_rounding", True, False)
    computes_in_half = fsdp.dtype == "bfloat16" or (fsdp.dtype == "auto" and config.trainer.device == "cuda")
    if computes_in_half or fsdp.dtype == "float16":
        yield Need("float16" if fsdp.dtype == "float16" else "bfloat16", f"{key}.dtype", fsdp.dtype, "float32")
    if fsdp.fsdp_size not in (-1, ranks):
        yield Need("replicas", f"{key}.fsdp_size", fsdp.fsdp_size, -1)
    if fsdp.expert_parallel_size > 1:
        yield Need("expert_parallel", f"{key}.expert_parallel_size", fsdp.expert_parallel_size, 1)
    for name in ("param_offload", "optimizer_offload", "offload_policy"):
        if getattr(fsdp, name):
            yield Need("offload", f"{key}.{name}", True, False)


def _find_policy_needs(config: Config) -> Iterator[Need]:
    """Yield the needs of the algorithm."""
    actor, algorithm, distillation = config.actor_rollout_ref.actor, config.algorithm, config.distillation
    if actor.use_kl_loss and actor.kl_loss_type == "full":
        yield Need("exact_kl", f"{ACTOR}.kl_loss_type", "full", "low_var_kl")
    if algorithm.use_kl_in_reward and algorithm.kl_penalty == "full":
        yield Need("exact_kl", "algorithm.kl_penalty", "full", "kl")
    if distillation.enable and distillation.mode == "loss":
        yield Need("exact_kl", "distillation.mode", "loss", "reward")
    if algorithm.adv_estimator in _USE_SQUARES:
        yield Need("squared_probs", "algorithm.adv_estimator", algorithm.adv_estimator, "grpo")
    if actor.router_replay.mode != "disabled":
        yield Need("routing", f"{ACTOR}.router_replay.mode", actor.router_replay.mode, "disabled")
    if actor.router_aux_loss_coef:
        yield Need("routing", f"{ACTOR}.router_aux_loss_coef", actor.router_aux_loss_coef, 0.0)
    if actor.use_prefix_grouper:
        yield Need("shared_prompts", f"{ACTOR}.use_prefix_grouper", True, False)
