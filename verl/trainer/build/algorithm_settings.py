"""Converts the settings of a run to those of its algorithm."""

from __future__ import annotations

from typing import Any

from verl.algorithms.settings import (
    AlgorithmSettings,
    Correction,
    Distillation,
    EstimatorOptions,
    KlController,
    LossOptions,
    Rejection,
)
from verl.config.features import get_importance_weights, uses_critic, uses_preferences, uses_task_rewards
from verl.config.schema.conditions import is_custom_function
from verl.config.schema.root import Config
from verl.trainer.build.reward_settings import reward_components


def algorithm_settings(config: Config) -> AlgorithmSettings:
    algorithm, actor, critic = config.algorithm, config.actor_rollout_ref.actor, config.critic
    loss, correction, kl = actor.policy_loss, algorithm.rollout_correction, algorithm.kl_ctrl
    (low, high), teacher = actor.clip_range, config.distillation
    is_reinforce = correction.bypass_mode and correction.loss_type == "reinforce"
    return AlgorithmSettings(
        estimator=_estimator(config),
        estimator_options=EstimatorOptions(
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            by_std=algorithm.norm_adv_by_std_in_grpo,
            outcome_coef=config.reward.prime.outcome_coef,
            process_coef=config.reward.prime.coef,
            step_weight=algorithm.gigpo.step_advantage_w,
            component_weights=reward_components(config),
        ),
        loss_mode="gpg" if is_reinforce else loss.loss_mode,
        loss_options=LossOptions(
            clip_low=low, clip_high=high, clip_c=actor.clip_ratio_c, **loss.model_dump(exclude={"loss_mode"})
        ),
        agg_mode=actor.loss_agg_mode,
        scale=actor.loss_scale_factor or config.data.max_response_length,
        entropy_coeff=actor.entropy_coeff,
        loss_kl_coef=actor.kl_loss_coef if actor.use_kl_loss else None,
        loss_kl_type=actor.kl_loss_type,
        reward_kl=KlController(kl.kl_coef, kl.type == "adaptive", kl.target_kl, kl.horizon)
        if algorithm.use_kl_in_reward
        else None,
        reward_kl_type=algorithm.kl_penalty,
        distillation=Distillation(**teacher.model_dump(exclude={"enable", "teacher", "use_task_rewards"}))
        if teacher.enable
        else None,
        correction=Correction(
            **_weighting(config, is_ratio_weighted=correction.bypass_mode and not is_reinforce),
            reject=tuple(Rejection(*criterion) for criterion in correction.list_rejections()),
            bypass=correction.bypass_mode,
        ),
        value_clip=critic.cliprange_value,
        value_agg_mode=critic.loss_agg_mode,
        critic_warmup=config.trainer.critic_warmup if uses_critic(config) else 0,
        mask_truncated=algorithm.mask_truncated,
        ref_update_freq=config.trainer.ref_update_freq,
        ref_update_ratio=config.trainer.ref_update_ratio,
        prime_beta=config.reward.prime.beta,
    )


def _weighting(config: Config, *, is_ratio_weighted: bool) -> dict[str, Any]:
    """Return the importance weights: none if the ratio of the loss is already that to the engine."""
    correction, kind = config.algorithm.rollout_correction, get_importance_weights(config)
    if kind is None or is_ratio_weighted:
        return {}
    *lower, upper = map(float, str(correction.rollout_is_threshold).split("_"))
    if kind == "icepop" and not lower:
        lower = [correction.rollout_is_threshold_lower]
    return {
        "weigh": "sequence" if kind == "sequence" else "token",
        "threshold": upper,
        "threshold_lower": lower[0] if lower else None,
        "normalize": correction.rollout_is_batch_normalize,
    }


def _estimator(config: Config) -> str:
    """Return the advantage estimator. Preference losses (SPPO, DPO) use win rates; PRIME adds its rewards to rloo.

    Without rewards the teacher is all that advantages come from.
    """
    estimator = config.algorithm.adv_estimator
    if not uses_task_rewards(config):
        return "no_rewards"
    if uses_preferences(config):
        return "win_rate"
    return "prime" if config.reward.prime.enable and not is_custom_function(estimator) else estimator
