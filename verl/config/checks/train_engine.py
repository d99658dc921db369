"""Checks of the settings of a run against what its training engine supports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from verl.config.batch_sizes import count_train_ranks
from verl.config.checks.conflict import Conflict
from verl.config.features import TrainedModel, list_trained_models
from verl.config.paths import format_value, get_value
from verl.config.schema import Config, SftConfig
from verl.config.schema.conditions import ACTOR, ROLLOUT
from verl.config.train_engines import DEFAULT_ENGINE, Capability, get_train_engine, list_train_engines


class _Need(NamedTuple):
    """A setting that requires a capability of the engine, unless it has the value `otherwise`.

    If `values` are given, only these require it, and only if the setting `switch`, if any, is true.
    """

    capability: Capability
    key: str
    otherwise: Any
    values: tuple[Any, ...] = ()
    switch: str | None = None


_MODEL_NEEDS = (
    _Need("sequence_parallel", "ulysses_sequence_parallel_size", 1),
    _Need("adapters", "peft.lora_rank", 0),
)
_OPTIM_NEEDS = (_Need("adamw_8bit", "name", "adamw", ("adamw_8bit",)), _Need("muon", "name", "adamw", ("muon",)))
_FSDP_NEEDS = (
    _Need("bfloat16_weights", "model_dtype", "float32"),
    _Need("stochastic_rounding", "stochastic_rounding", False),
    _Need("bfloat16", "dtype", "float32", ("bfloat16",)),
    _Need("float16", "dtype", "float32", ("float16",)),
    _Need("expert_parallel", "expert_parallel_size", 1),
    *(_Need("offload", name, False) for name in ("param_offload", "optimizer_offload", "offload_policy")),
)
_POLICY_NEEDS = (
    _Need("exact_kl", f"{ACTOR}.kl_loss_type", "low_var_kl", ("full",), f"{ACTOR}.use_kl_loss"),
    _Need("exact_kl", "algorithm.kl_penalty", "kl", ("full",), "algorithm.use_kl_in_reward"),
    _Need("exact_kl", "distillation.mode", "reward", ("loss",), "distillation.enable"),
    _Need("squared_probs", "algorithm.adv_estimator", "grpo", ("optimal_token_baseline", "tir_optimal_token_baseline")),
    _Need("routing", f"{ACTOR}.router_replay.mode", "disabled"),
    _Need("routing", f"{ACTOR}.router_aux_loss_coef", 0.0),
    _Need("sampling_mask", f"{ROLLOUT}.keep_sampling_mask", False),
    _Need("shared_prompts", f"{ACTOR}.use_prefix_grouper", False),
)


def find_conflicts(config: Config | SftConfig) -> Iterator[Conflict]:
    """Yield settings that need what the training engine does not support, and engines that cannot be combined."""
    for model in list_trained_models(config):
        spec, strategy = get_train_engine(model.settings.strategy), f"{model.key}.strategy"
        for need, value in _find_needs(config, model):
            if need.capability not in spec.capabilities:
                others = [name for name in list_train_engines(supporting=need.capability) if name != spec.name]
                fix = f"={format_value(need.otherwise)}" + (f", or {strategy}={others[0]}" if others else "")
                reason = f"{format_value(value)} is not supported by the training engine {spec.name}"
                yield Conflict(need.key, reason, fix)
    if config.trainer.device == "cpu":
        yield from find_cpu_conflicts(config)
    names = [model.settings.strategy for model in list_trained_models(config)]
    if len(set(names)) > 1:
        reason = f"{names[1]} and {ACTOR}.strategy={names[0]} cannot be combined: both models get the same batches"
        yield Conflict("critic.strategy", reason, f"={names[0]}")


def find_cpu_conflicts(config: Config | SftConfig) -> Iterator[Conflict]:
    """Yield engines that cannot train without accelerators."""
    for model in list_trained_models(config):
        if get_train_engine(model.settings.strategy).needs_accelerators:
            reason = f"{model.settings.strategy} needs accelerators, and this run has none (trainer.device)"
            yield Conflict(f"{model.key}.strategy", reason, f"={DEFAULT_ENGINE}")


def _find_needs(config: Config | SftConfig, model: TrainedModel) -> Iterator[tuple[_Need, Any]]:
    """Yield what a trained model needs, with the value that needs it."""
    ranks, per_node, fsdp = count_train_ranks(config), config.trainer.n_gpus_per_node, model.settings.fsdp_config
    section = f"{model.key}.fsdp_config"
    if ranks > 1:
        yield _Need("many_ranks", "trainer.n_gpus_per_node", 1), per_node
    if model.key == "critic":
        yield _Need("value_head", "critic.enable", False), True
    needs = [need._replace(key=f"{model.key}.{need.key}") for need in _MODEL_NEEDS]
    needs += [need._replace(key=f"{model.optim_key}.{need.key}") for need in _OPTIM_NEEDS]
    if get_train_engine(model.settings.strategy).section == "fsdp_config":  # else these settings have no effect
        needs += [need._replace(key=f"{section}.{need.key}") for need in _FSDP_NEEDS]
        if fsdp.dtype == "auto" and config.trainer.device == "cuda":
            yield _Need("bfloat16", f"{section}.dtype", "float32"), "auto"
        if fsdp.fsdp_size not in (-1, ranks):
            yield _Need("replicas", f"{section}.fsdp_size", -1), fsdp.fsdp_size
    needs += _POLICY_NEEDS if model.key == ACTOR else ()
    for need in needs:
        value, is_on = get_value(config, need.key), need.switch is None or get_value(config, need.switch)
        if is_on and (value in need.values if need.values else value not in (need.otherwise, None)):
            yield need, value
