"""Checks of asynchronous runs, in which a response may be older than the weights that it trains."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.checks.conflict import Conflict
from verl.config.features import frees_engine_memory, get_importance_weights
from verl.config.rollout_engines import get_rollout_engine
from verl.config.schema import Config
from verl.config.schema.conditions import LOSS, ROLLOUT

_STALENESS, _WEIGHTS = "trainer.max_staleness", "algorithm.rollout_correction.rollout_is"
_UNCLIPPED = ("gpg", "kl_cov", "dpo", "sppo")


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield settings that need a synchronous run."""
    staleness, rollout = config.trainer.max_staleness, config.actor_rollout_ref.rollout
    if staleness == 0:
        return
    if config.trainer.deterministic:
        reason = (
            f"{staleness} lets a step take the responses that finish first, and trainer.deterministic=true does not"
        )
        yield Conflict(_STALENESS, reason, "=0")
    if config.data.sampler is not None:
        reason = f"with data.sampler={config.data.sampler}, which prompts follow which scores would depend on time"
        yield Conflict(_STALENESS, f"{staleness} is not possible {reason}", "=0")
    engine = get_rollout_engine(rollout.name)
    if frees_engine_memory(config, config.trainer.device) and not engine.capabilities.continues_requests:
        reason = (
            f"true with {_STALENESS}={staleness} needs an engine that sleeps under running requests; {rollout.name}"
        )
        yield Conflict(f"{ROLLOUT}.free_cache_engine", f"{reason} does not", "=false")


def find_hints(config: Config) -> Iterator[Conflict]:
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
    if correction.rollout_rs or correction.bypass_mode or get_importance_weights(config):
        return
    reason = f"{correction.rollout_is or 'null'} leaves responses that are up to {staleness} versions old uncorrected"
    if rollout.top_p < 1 or rollout.top_k > 0:
        cause = "importance weights need log-probs of the full distribution, which top_p and top_k truncate"
        yield Conflict(_WEIGHTS, f"{reason}: {cause}", f"set {ROLLOUT}.top_p=1.0 and {ROLLOUT}.top_k=-1")
    else:
        yield Conflict(_WEIGHTS, reason, "=token")
