"""Checks of the settings of the algorithm, and of distillation, against each other."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.checks.conflict import Conflict
from verl.config.checks.ignored import find_unmet_condition
from verl.config.features import (
    has_environment,
    uses_critic,
    uses_preferences,
    uses_reward_function,
    uses_task_rewards,
)
from verl.config.paths import is_overridden
from verl.config.schema import Config, collect_settings
from verl.config.schema.algorithm import RATIOS, RolloutCorrectionConfig
from verl.config.schema.conditions import ACTOR, ESTIMATOR, LOSS, ROLLOUT, is_custom_function

_LOSS, _KL = f"{ACTOR}.policy_loss", "algorithm.kl_ctrl"
_CORRECTION, _BYPASS = "algorithm.rollout_correction", "algorithm.rollout_correction.bypass_mode"
_TEMPLATE, _REWARDS = "distillation.teacher.use_own_chat_template=true", "distillation.use_task_rewards"
_COMPONENTS, _KL_REWARD = "algorithm.reward_components", "algorithm.use_kl_in_reward"
_GROUP_ESTIMATORS = (
    *("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg"),
    *("reinforce_plus_plus_baseline", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline", "gigpo"),
)
"""Estimators that compare a response with its group; in a group of one, the advantage is the raw score."""


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield settings of the algorithm that cannot work together."""
    yield from _check_group_size(config)
    yield from _check_critic(config)
    yield from _check_components(config)
    yield from _check_ranges(config)
    yield from _check_correction(config)
    if config.reward.prime.enable:
        yield from _check_prime(config)
    if config.distillation.enable:
        yield from _check_distillation(config)


def _check_ranges(config: Config) -> Iterator[Conflict]:
    """Check numbers whose limits depend on other settings."""
    loss, trainer, control = config.actor_rollout_ref.actor.policy_loss, config.trainer, config.algorithm.kl_ctrl
    if loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
        reason = f"{loss.clip_cov_lb} must be below {_LOSS}.clip_cov_ub={loss.clip_cov_ub}"
        yield Conflict(f"{_LOSS}.clip_cov_lb", reason, f"={loss.clip_cov_ub - 4}")
    low, key = config.actor_rollout_ref.actor.clip_range[0], f"{ACTOR}.clip_ratio_low"
    if low >= 1 and loss.loss_mode != "cispo" and find_unmet_condition(config, key) is None:
        reason = f"must be below 1, since a probability ratio is above 0; only {LOSS}=cispo works without a lower bound"
        yield Conflict(key, f"{low:g} {reason}", "=0.2")
    overlong, longest = config.reward.overlong_buffer, config.data.max_response_length
    if overlong.enable and not 1 <= overlong.len <= longest:
        reason = f"{overlong.len} must be 1 to data.max_response_length={longest}"
        yield Conflict("reward.overlong_buffer.len", reason, f"={max(1, longest // 5)}")
    steps, warmup = trainer.total_training_steps, trainer.critic_warmup
    if uses_critic(config) and steps is not None and warmup >= steps:
        reason = f"{warmup} must be below trainer.total_training_steps={steps}, or the policy is never trained"
        yield Conflict("trainer.critic_warmup", reason, f"={steps // 10}")
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    # The controller changes its coefficient by a factor of up to 0.2 * samples / horizon: it could become negative.
    if config.algorithm.use_kl_in_reward and control.type == "adaptive" and 0.2 * samples >= control.horizon:
        yield Conflict(
            f"{_KL}.horizon",
            f"{control.horizon:g} must be above a fifth of the {samples} samples of a step (data.train_batch_size x "
            f"{ROLLOUT}.n), or the KL coefficient can become negative",
            f"={10 * samples}",
        )


def _check_group_size(config: Config) -> Iterator[Conflict]:
    """Check that there are two responses per prompt where they are compared."""
    n, algorithm = config.actor_rollout_ref.rollout.n, config.algorithm
    reasons = []
    if uses_preferences(config):
        reasons.append(f"{LOSS}={config.actor_rollout_ref.actor.policy_loss.loss_mode}")
    elif algorithm.adv_estimator == "grpo_passk" and uses_task_rewards(config):
        reasons.append(f"{ESTIMATOR}={algorithm.adv_estimator}")
    if algorithm.filter_groups.enable:
        reasons.append("algorithm.filter_groups.enable=true")
    if reasons and n < 2:
        reason = f"with {' and '.join(reasons)}, since responses to the same prompt are compared"
        yield Conflict(f"{ROLLOUT}.n", f"{n} must be at least 2 {reason}", "=8")


def _check_components(config: Config) -> Iterator[Conflict]:
    """Check the reward components and their weights."""
    algorithm, reward = config.algorithm, config.reward
    names, weights = algorithm.reward_components, algorithm.component_weights
    if repeated := {name for name in names if names.count(name) > 1}:
        yield Conflict(_COMPONENTS, f"{min(repeated)} is listed more than once", "remove the others")
    if weights is not None and len(weights) != len(names):
        reason = f"{len(weights)} weights for {len(names)} names in {_COMPONENTS}"
        yield Conflict("algorithm.component_weights", reason, "give one weight per name")
    if algorithm.adv_estimator != "gdpo" or uses_preferences(config) or not uses_task_rewards(config):
        return
    has_parts = (reward.functions or _adds_model(config)) and not has_environment(config)
    if not (names or has_parts or reward.overlong_buffer.enable):
        yield Conflict(
            ESTIMATOR,
            "gdpo normalizes each component of the reward, but none is known",
            f"set {_COMPONENTS}=[correct,format] with the names of numbers that the reward function returns, or list "
            "several functions in reward.functions",
        )
    if algorithm.use_kl_in_reward:
        reason = "gdpo uses the components of the reward, and the KL is not one of them"
        yield Conflict(_KL_REWARD, reason, f"=false and {ACTOR}.use_kl_loss=true")


def _adds_model(config: Config) -> bool:
    """Whether the score is a sum of a function and a reward model."""
    return config.reward.reward_model.enable and uses_reward_function(config)


def _check_correction(config: Config) -> Iterator[Conflict]:
    correction, algorithm = config.algorithm.rollout_correction, config.algorithm
    yield from _check_rejection(correction)
    if not correction.bypass_mode:
        return
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if correction.loss_type == "reinforce" and mode not in ("vanilla", "gpg"):
        reason = f"reinforce replaces the policy loss, but {LOSS}={mode} was chosen"
        yield Conflict(f"{_CORRECTION}.loss_type", reason, f"=ppo_clip, or remove {LOSS}")
    saves = "true saves the forward pass that"
    if algorithm.use_kl_in_reward and algorithm.kl_penalty == "full":
        reason = f"{saves} the exact KL (algorithm.kl_penalty=full) requires"
        yield Conflict(_BYPASS, reason, "set algorithm.kl_penalty=low_var_kl")
    estimator, uses_estimator = algorithm.adv_estimator, uses_task_rewards(config) and not uses_preferences(config)
    if uses_estimator and estimator in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        yield Conflict(_BYPASS, f"{saves} {ESTIMATOR}={estimator} requires", "=false")


def _check_rejection(correction: RolloutCorrectionConfig) -> Iterator[Conflict]:
    kinds, thresholds = correction.rollout_rs or [], str(correction.rollout_rs_threshold).split(",")
    key = f"{_CORRECTION}.rollout_rs"
    if kinds and len(thresholds) not in (1, len(kinds)):
        reason = f"{len(thresholds)} thresholds for {len(kinds)} criteria in {key}"
        yield Conflict(f"{key}_threshold", reason, "give one, or one for each criterion")
        return
    for kind, lower, upper in correction.list_rejections():
        if kind not in ("token", "sequence") and "rollout_rs_threshold" not in correction.model_fields_set:
            reason = f"hardly differs from its ideal value, so the default threshold of {upper:g} would reject nothing"
            fix = 1.001 if kind == "geometric" else 0.01
            yield Conflict(key, f"{kind} {reason}", f"set {key}_threshold={fix}")
        elif kind in RATIOS and not lower < 1 < upper:
            reason = f"{lower:g} to {upper:g} must contain 1, the ratio of equal probabilities"
            yield Conflict(f"{key}_threshold", reason, "=2.0")
        elif kind not in RATIOS and lower:
            reason = f"{lower:g}_{upper:g} has a lower bound, but {kind} is at least 0, and 0 means no mismatch"
            yield Conflict(f"{key}_threshold", reason, f"={upper:g}")


def _check_critic(config: Config) -> Iterator[Conflict]:
    """Check critic.enable: gae requires a critic, and only gae and custom estimators return targets for it."""
    enable, estimator = config.critic.enable, config.algorithm.adv_estimator
    if not uses_task_rewards(config) or uses_preferences(config):  # no critic
        return
    models = ("critic.model.", "critic.optim.")
    given = [key for key in collect_settings(Config) if key.startswith(models) and is_overridden(config, key)]
    has_baseline = estimator not in _GROUP_ESTIMATORS or config.actor_rollout_ref.rollout.n > 1
    if enable is None and given and not has_baseline:
        yield Conflict(
            ESTIMATOR,
            f"{estimator} with {ROLLOUT}.n=1 has no baseline, and does not use the critic that is configured "
            f"({', '.join(given)})",
            f"=gae for PPO, or {ROLLOUT}.n=8",
        )
    if enable is None or is_custom_function(estimator) or enable == (estimator == "gae"):
        return
    reason = "returns nothing to train it on" if enable else "requires its values"
    fix = f"remove critic.enable, or set {ESTIMATOR}={'gae' if enable else 'grpo'}"
    yield Conflict("critic.enable", f"{str(enable).lower()}, but {ESTIMATOR}={estimator} {reason}", fix)


def _check_prime(config: Config) -> Iterator[Conflict]:
    estimator, mode = config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if uses_preferences(config):
        reason = f"true gives rewards per token, but {LOSS}={mode} uses only whole responses"
        yield Conflict("reward.prime.enable", reason, f"set {LOSS}=vanilla")
    elif estimator not in ("rloo", "rloo_vectorized") and not is_custom_function(estimator):
        reason = f"true requires leave-one-out baselines, which {ESTIMATOR}={estimator} does not have"
        yield Conflict("reward.prime.enable", reason, f"set {ESTIMATOR}=rloo")


def _check_distillation(config: Config) -> Iterator[Conflict]:
    distillation, algorithm, data = config.distillation, config.algorithm, config.data
    if distillation.teacher.path is None:
        fix = "set distillation.teacher.path=Qwen/Qwen2.5-7B-Instruct, or another model with the policy's tokenizer"
        yield Conflict("distillation.enable", "true requires a teacher", fix)
    if distillation.teacher.use_own_chat_template and not data.filter_overlong_prompts and data.truncation != "error":
        yield Conflict(
            "data.truncation",
            f"{data.truncation} would remove other parts of a prompt from the policy's rendering than from the "
            f"teacher's, which {_TEMPLATE} adds",
            "set data.filter_overlong_prompts=true to drop long prompts, or data.truncation=error",
        )
    if uses_preferences(config) and (distillation.mode == "reward" or not distillation.use_task_rewards):
        mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
        yield Conflict(
            "distillation.mode",
            f"{distillation.mode} needs a policy loss with advantages, but {LOSS}={mode} compares scored responses",
            f"set {LOSS}=vanilla" + (", or distillation.mode=loss" if distillation.use_task_rewards else ""),
        )
    if distillation.use_task_rewards:
        return
    for key, is_on, fix in (
        ("algorithm.filter_groups.enable", algorithm.filter_groups.enable, "=false"),
        ("algorithm.use_kl_in_reward", algorithm.use_kl_in_reward, f"set {ACTOR}.use_kl_loss=true instead"),
        ("reward.prime.enable", config.reward.prime.enable, "=false"),
    ):
        if is_on:
            reason = f"true requires rewards, but {_REWARDS}=false scores no training response"
            yield Conflict(key, reason, f"{fix}, or {_REWARDS}=true")


def find_hints(config: Config) -> Iterator[Conflict]:
    """Yield settings of the algorithm that work but are probably a mistake."""
    algorithm, actor, n = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    (low, high), key = actor.clip_range, f"{ACTOR}.clip_ratio_low"
    is_cispo = actor.policy_loss.loss_mode == "cispo"
    if is_cispo and low < 1:
        reason = f"{low:g} raises the weight of a token that the policy has nearly unlearned to {1 - low:g}"
        yield Conflict(key, reason, "=10, which bounds weights from above only")
    if low > high and not is_cispo and find_unmet_condition(config, key) is None:
        yield Conflict(key, f"{low} is above clip_ratio_high={high}", "usually the upper range is wider")
    compares = algorithm.adv_estimator in _GROUP_ESTIMATORS and not uses_preferences(config)
    if compares and n < 2 and uses_task_rewards(config):
        reason = f"{ESTIMATOR}={algorithm.adv_estimator} no group to compare with: advantages are the raw scores"
        yield Conflict(f"{ROLLOUT}.n", f"{n} response per prompt leaves {reason}", "=8")
    for name, key, is_part in (
        ("overlong_penalty", "reward.overlong_buffer.enable", config.reward.overlong_buffer.enable),
        ("model_score", "reward.reward_model.enable", _adds_model(config)),
    ):
        names = algorithm.reward_components
        if algorithm.adv_estimator == "gdpo" and is_part and names and name not in names:
            reason = f"{key}=true has no effect on gdpo without its component"
            yield Conflict(_COMPONENTS, reason, f"add {name}, or set {key}=false")
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        reason = f"{actor.kl_loss_type} estimates the KL, but its gradient is 0 on average and has no effect"
        yield Conflict(f"{ACTOR}.kl_loss_type", reason, "=low_var_kl")
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        reason = f"with {ACTOR}.use_kl_loss=true the KL to the reference counts twice"
        yield Conflict(_KL_REWARD, reason, "=false to keep only that of the loss")
    for switch, key, is_unused in (
        (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", actor.use_kl_loss and actor.kl_loss_coef == 0),
        (_KL_REWARD, f"{_KL}.kl_coef", algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0),
    ):
        if is_unused:
            yield Conflict(key, "with 0 the KL to the reference is computed but not used", f"set {switch}=false")
    if config.distillation.enable and config.distillation.teacher.path == config.actor_rollout_ref.model.path:
        reason = "is the model that is trained, so the policy is only regularized toward its initial weights"
        yield Conflict("distillation.teacher.path", reason, "set it to a stronger model")
