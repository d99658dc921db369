"""Checks of the algorithm's settings against each other."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import distillation_validation
from verl.config.features import uses_critic, uses_preferences, uses_reward_function, uses_task_rewards
from verl.config.ignored import find_unmet_condition
from verl.config.paths import is_overridden
from verl.config.schema import Config, collect_settings
from verl.config.schema.rules import ACTOR, ROLLOUT, is_custom_function

_LOSS = f"{ACTOR}.policy_loss"
_KL = "algorithm.kl_ctrl"
_CORRECTION = "algorithm.rollout_correction"
_GROUP_ESTIMATORS = (
    *("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg"),
    *("reinforce_plus_plus_baseline", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"),
)
"""Estimators that compare a response with its group; in a group of one, the advantage is the raw score."""


def find_conflicts(config: Config) -> Iterator[str]:
    """Yield settings of the algorithm that cannot work together."""
    loss, trainer, control = config.actor_rollout_ref.actor.policy_loss, config.trainer, config.algorithm.kl_ctrl
    yield from _check_group_size(config)
    yield from _check_critic(config)
    yield from _check_components(config)
    if loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
        yield (
            f"{_LOSS}.clip_cov_lb: {loss.clip_cov_lb} must be below {_LOSS}.clip_cov_ub={loss.clip_cov_ub}; set "
            f"{_LOSS}.clip_cov_lb={loss.clip_cov_ub - 4}"
        )
    low, _ = config.actor_rollout_ref.actor.clip_range
    if low >= 1 and loss.loss_mode != "cispo" and find_unmet_condition(config, f"{ACTOR}.clip_ratio_low") is None:
        yield (
            f"{ACTOR}.clip_ratio_low: {low:g} must be below 1, since a probability ratio is above 0; only "
            f"{_LOSS}.loss_mode=cispo works without a lower bound; set {ACTOR}.clip_ratio_low=0.2"
        )
    yield from _check_correction(config)
    overlong, longest = config.reward.overlong_buffer, config.data.max_response_length
    if overlong.enable and not 1 <= overlong.len <= longest:
        yield (
            f"reward.overlong_buffer.len: {overlong.len} must be 1 to data.max_response_length={longest}; set "
            f"reward.overlong_buffer.len={max(1, longest // 5)}"
        )
    steps = trainer.total_training_steps
    if uses_critic(config) and steps is not None and trainer.critic_warmup >= steps:
        yield (
            f"trainer.critic_warmup: {trainer.critic_warmup} must be below trainer.total_training_steps={steps}, or "
            f"the policy is never trained; set trainer.critic_warmup={steps // 10}"
        )
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    # The controller changes its coefficient by up to 0.2 * samples / horizon of it, so it could become negative.
    if config.algorithm.use_kl_in_reward and control.type == "adaptive" and 0.2 * samples >= control.horizon:
        yield (
            f"{_KL}.horizon: {control.horizon:g} must be above a fifth of the {samples} samples of a step "
            f"(data.train_batch_size x {ROLLOUT}.n), or the KL coefficient can become negative; set "
            f"{_KL}.horizon={10 * samples}"
        )
    if config.reward.prime.enable:
        yield from _check_prime(config)
    yield from distillation_validation.find_conflicts(config)


def _check_group_size(config: Config) -> Iterator[str]:
    """Check that there are two responses per prompt where they are compared."""
    n, algorithm = config.actor_rollout_ref.rollout.n, config.algorithm
    reasons = []
    if uses_preferences(config):
        reasons.append((f"{_LOSS}.loss_mode", config.actor_rollout_ref.actor.policy_loss.loss_mode))
    elif algorithm.adv_estimator == "grpo_passk" and uses_task_rewards(config):
        reasons.append(("algorithm.adv_estimator", algorithm.adv_estimator))
    if algorithm.filter_groups.enable:
        reasons.append(("algorithm.filter_groups.enable", "true"))
    if reasons and n < 2:
        shown = " and ".join(f"{key}={value}" for key, value in reasons)
        yield (
            f"{ROLLOUT}.n: {n} must be at least 2 with {shown}, since responses to the same prompt are compared; set "
            f"{ROLLOUT}.n=8"
        )


def _check_components(config: Config) -> Iterator[str]:
    """Check the reward components and their weights."""
    algorithm, reward = config.algorithm, config.reward
    names, weights = algorithm.reward_components, algorithm.component_weights
    if repeated := {name for name in names if names.count(name) > 1}:
        yield f"algorithm.reward_components: {min(repeated)} is listed more than once; remove the others"
    if weights is not None and len(weights) != len(names):
        yield (
            f"algorithm.component_weights: {len(weights)} weights for {len(names)} names in "
            "algorithm.reward_components; give one weight per name"
        )
    if algorithm.adv_estimator != "gdpo" or uses_preferences(config) or not uses_task_rewards(config):
        return
    if not (names or reward.functions or reward.overlong_buffer.enable or _adds_model(config)):
        yield (
            "algorithm.adv_estimator: gdpo normalizes each component of the reward, but none is known; set "
            "algorithm.reward_components=[correct,format] with the names of numbers that the reward function returns, "
            "or list several functions in reward.functions"
        )
    if algorithm.use_kl_in_reward:
        yield (
            "algorithm.use_kl_in_reward: gdpo uses the components of the reward, and the KL is none of them; set "
            f"algorithm.use_kl_in_reward=false and {ACTOR}.use_kl_loss=true"
        )


def _adds_model(config: Config) -> bool:
    """Whether the score is a sum of a function and a reward model."""
    return config.reward.reward_model.enable and uses_reward_function(config)


def _check_correction(config: Config) -> Iterator[str]:
    correction, algorithm = config.algorithm.rollout_correction, config.algorithm
    reject, threshold = correction.rollout_rs, correction.rollout_rs_threshold
    if reject not in (None, "token", "sequence") and "rollout_rs_threshold" not in correction.model_fields_set:
        fix = 1.001 if reject == "geometric" else 0.01
        yield (
            f"{_CORRECTION}.rollout_rs: {reject} hardly differs from its ideal value, so the default threshold of "
            f"{threshold:g} would reject nothing; set {_CORRECTION}.rollout_rs_threshold={fix}"
        )
    elif reject in ("token", "sequence", "geometric") and threshold <= 1:
        yield (
            f"{_CORRECTION}.rollout_rs_threshold: {threshold:g} must be above 1, the ratio of equal probabilities; set "
            f"{_CORRECTION}.rollout_rs_threshold=2.0"
        )
    if not correction.bypass_mode:
        return
    for key, is_given in (("rollout_is", correction.rollout_is), ("rollout_rs", reject)):
        if is_given:
            yield (
                f"{_CORRECTION}.{key}: compares the trainer's log-probs with the engine's, but {_CORRECTION}."
                f"bypass_mode=true does not compute the former; set {_CORRECTION}.bypass_mode=false"
            )
    if algorithm.use_kl_in_reward and algorithm.kl_penalty == "full":
        yield (
            f"{_CORRECTION}.bypass_mode: true saves the forward pass that the exact KL (algorithm.kl_penalty=full) "
            "requires; set algorithm.kl_penalty=low_var_kl"
        )
    uses_estimator = uses_task_rewards(config) and not uses_preferences(config)
    if uses_estimator and algorithm.adv_estimator in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        yield (
            f"{_CORRECTION}.bypass_mode: true saves the forward pass that algorithm.adv_estimator="
            f"{algorithm.adv_estimator} requires; set {_CORRECTION}.bypass_mode=false"
        )


def _check_critic(config: Config) -> Iterator[str]:
    """Check critic.enable: gae requires a critic, and only gae and custom estimators return targets for it."""
    enable, estimator = config.critic.enable, config.algorithm.adv_estimator
    if not uses_task_rewards(config):  # no critic
        return
    models = ("critic.model.", "critic.optim.")
    given = [key for key in collect_settings(Config) if key.startswith(models) and is_overridden(config, key)]
    has_baseline = estimator not in _GROUP_ESTIMATORS or config.actor_rollout_ref.rollout.n > 1
    if enable is None and given and not has_baseline and not uses_preferences(config):
        yield (
            f"algorithm.adv_estimator: {estimator} with {ROLLOUT}.n=1 has no baseline, and does not use the critic "
            f"that is configured ({', '.join(given)}); set algorithm.adv_estimator=gae for PPO, or {ROLLOUT}.n=8"
        )
    if enable is None or is_custom_function(estimator) or uses_preferences(config) or enable == (estimator == "gae"):
        return
    reason = "returns nothing to train it on" if enable else "requires its values"
    yield (
        f"critic.enable: {str(enable).lower()}, but algorithm.adv_estimator={estimator} {reason}; remove "
        f"critic.enable, or set algorithm.adv_estimator={'gae' if enable else 'grpo'}"
    )


def _check_prime(config: Config) -> Iterator[str]:
    estimator, mode = config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if uses_preferences(config):
        yield (
            f"reward.prime.enable: true gives rewards per token, but {_LOSS}.loss_mode={mode} uses only whole "
            f"responses; set {_LOSS}.loss_mode=vanilla"
        )
    elif estimator not in ("rloo", "rloo_vectorized") and not is_custom_function(estimator):
        yield (
            f"reward.prime.enable: true requires leave-one-out baselines, which algorithm.adv_estimator={estimator} "
            "does not have; set algorithm.adv_estimator=rloo"
        )


def find_hints(config: Config) -> Iterator[str]:
    """Yield settings of the algorithm that work but are probably a mistake."""
    algorithm, actor, n = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    compares = algorithm.adv_estimator in _GROUP_ESTIMATORS and not uses_preferences(config)
    if compares and n < 2 and uses_task_rewards(config):
        yield (
            f"{ROLLOUT}.n: {n} response per prompt leaves algorithm.adv_estimator={algorithm.adv_estimator} no group "
            f"to compare with: advantages are the raw scores; set {ROLLOUT}.n=8"
        )
    for name, key, is_part in (
        ("overlong_penalty", "reward.overlong_buffer.enable", config.reward.overlong_buffer.enable),
        ("model_score", "reward.reward_model.enable", _adds_model(config)),
    ):
        names = algorithm.reward_components
        if algorithm.adv_estimator == "gdpo" and is_part and names and name not in names:
            yield (
                f"algorithm.reward_components: {key}=true has no effect on gdpo without its component; add {name}, or "
                f"set {key}=false"
            )
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        yield (
            f"{ACTOR}.kl_loss_type: {actor.kl_loss_type} estimates the KL, but its gradient is 0 on average and pulls "
            f"nowhere; set {ACTOR}.kl_loss_type=low_var_kl"
        )
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield (
            f"algorithm.use_kl_in_reward: with {ACTOR}.use_kl_loss=true the KL to the reference counts twice; set "
            "algorithm.use_kl_in_reward=false to keep only that of the loss"
        )
    for switch, key, is_unused in (
        (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", actor.use_kl_loss and actor.kl_loss_coef == 0),
        ("algorithm.use_kl_in_reward", f"{_KL}.kl_coef", algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0),
    ):
        if is_unused:
            yield f"{key}: with 0 the KL to the reference is computed but not used; set {switch}=false"
    yield from distillation_validation.find_hints(config)
