"""Checks of asynchronous runs, in which a response may be older than the weights that it trains."""

from __future__ import annotations

import math
from collections.abc import Iterator

from verl.config.checks.conflict import Conflict
from verl.config.features import differs_by_truncation, frees_engine_memory, get_importance_weights, list_trained_models
from verl.config.rollout_engines import DEFAULT_ENGINE, get_rollout_engine
from verl.config.schema import Config
from verl.config.schema.conditions import ACTOR, LOSS, ROLLOUT

_STALENESS, _WEIGHTS = "trainer.max_staleness", "algorithm.rollout_correction.rollout_is"
_SAMPLER = "trainer.v1.sampler"
_UNCLIPPED = ("gpg", "kl_cov", "dpo", "sppo")
SCORE_AWARE = ("difficulty", "replay")
"""The values of `data.sampler` whose order depends on scores; custom functions are checked when they are loaded."""


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield settings that need a synchronous run. With trainer.device=auto the check is repeated once it is known."""
    staleness, rollout, actor = (
        config.trainer.max_staleness,
        config.actor_rollout_ref.rollout,
        config.actor_rollout_ref.actor,
    )
    if staleness == 0:
        return
    run_ahead = config.async_training.staleness_threshold or 0
    if run_ahead > staleness:
        reason = f"{run_ahead:g} batches must be at most {_STALENESS}={staleness}, or responses become too old"
        fix = f"={staleness}, or {_STALENESS}={math.ceil(run_ahead) + 1}"
        yield Conflict("async_training.staleness_threshold", reason, fix)
    if config.trainer.deterministic:
        reason = (
            f"{staleness} lets a step take the responses that finish first, and trainer.deterministic=true does not"
        )
        yield Conflict(_STALENESS, reason, "=0")
    if config.skip.rollout.enable:
        reason = "responses of another run are as old as the weights of their step"
        yield Conflict(_STALENESS, f"{staleness} is not possible with skip.rollout.enable=true: {reason}", "=0")
    if config.data.sampler in SCORE_AWARE:
        reason = f"with data.sampler={config.data.sampler}, which prompts follow which scores would depend on time"
        yield Conflict(_STALENESS, f"{staleness} is not possible {reason}", "=0")
    if actor.router_replay.mode == "R3":
        reason = (
            f"R3 with {_STALENESS}={staleness} would replay experts of other weights than those that sampled the token"
        )
        yield Conflict(f"{ACTOR}.router_replay.mode", reason, "=R2")
    if not _sleeps(config):
        return
    needs = f"with {_STALENESS}={staleness}, engines sleep under running requests"
    if not get_rollout_engine(rollout.name).capabilities.continues_requests:
        key, fix = "free_cache_engine", "=false, or actor_rollout_ref.hybrid_engine=False"
        if not config.actor_rollout_ref.hybrid_engine:
            key, fix = "lend_train_devices", "=False"
        yield Conflict(f"{ROLLOUT}.{key}", f"{needs}, which {rollout.name} does not support", fix)
    model = config.reward.reward_model
    if model.enable and "gpu_memory_utilization" not in get_rollout_engine(model.rollout.name).capabilities.settings:
        reason = f"{model.rollout.name} would score in the memory of the model that is trained: {needs}"
        yield Conflict("reward.reward_model.rollout.name", reason, f"={DEFAULT_ENGINE}")


def _sleeps(config: Config) -> bool:
    """Whether engines sleep while the model is trained, as far as it is known."""
    device = config.trainer.device
    return frees_engine_memory(config, "cpu" if device == "auto" else device)


def find_hints(config: Config) -> Iterator[Conflict]:
    """Yield settings that are probably a mistake in an asynchronous run."""
    yield from _find_uncorrected(config)
    yield from _find_other_counts(config)


def _find_uncorrected(config: Config) -> Iterator[Conflict]:
    """Yield settings with which old responses may destabilize training."""
    staleness, rollout = config.trainer.max_staleness, config.actor_rollout_ref.rollout
    if staleness == 0:
        return
    mode, correction = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.algorithm.rollout_correction
    if mode in _UNCLIPPED:
        reason = (
            f"{mode} does not clip, so that responses which are up to {staleness} versions old may move the policy far"
        )
        yield Conflict(LOSS, reason, f"=vanilla, or {_STALENESS}=1")
    if rollout.multi_turn.enable and _sleeps(config):
        reason = "counts the time in which the model is trained and an episode waits for its engine"
        yield Conflict(
            f"{ROLLOUT}.multi_turn.deadline_s", reason, "increase it, also timeouts of clients of the gateway"
        )
    if correction.rollout_rs or correction.has_ratio_to_engine or get_importance_weights(config):
        return
    reason = f"{correction.rollout_is or 'null'} leaves responses that are up to {staleness} versions old uncorrected"
    if differs_by_truncation(config):
        cause = "importance weights need log-probs of the full distribution, which top_p and top_k truncate"
        fix = f"set {ROLLOUT}.top_p=1.0 and {ROLLOUT}.top_k=-1, or {ROLLOUT}.keep_sampling_mask=true"
        yield Conflict(_WEIGHTS, f"{reason}: {cause}", fix)
    else:
        yield Conflict(_WEIGHTS, reason, "=token")


def _find_other_counts(config: Config) -> Iterator[Conflict]:
    """Yield numbers that count something else in the launch scripts that use the same settings."""
    updates = config.async_training.trigger_parameter_sync_step or 1
    for _, _, key, optim in list_trained_models(config):
        if optim.lr_warmup_steps and updates > 1:
            steps = -(-optim.lr_warmup_steps // updates)
            yield Conflict(
                f"{key}.lr_warmup_steps",
                f"{optim.lr_warmup_steps} counts steps of the run, each with a version of the weights; launch scripts "
                f"with async_training.trigger_parameter_sync_step={updates} count {updates} updates per version",
                f"={steps} for as many updates",
            )
    mode, sampler = config.trainer.v1.trainer_mode, config.trainer.v1.sampler
    if mode in ("colocate_async", "separate_async") and "max_off_policy_threshold" in sampler.model_fields_set:
        versions = sampler.max_off_policy_threshold
        yield Conflict(
            f"{_SAMPLER}.max_off_policy_threshold",
            f"{versions} is how many versions a response may lag here; in other launch scripts it includes the version "
            "that is trained",
            f"={max(1, versions - 1)} for the same bound" if versions > 1 else "",
        )
