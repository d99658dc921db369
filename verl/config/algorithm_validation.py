"""Checks of the algorithm's settings against each other."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.features import uses_critic, uses_preferences
from verl.config.problems import ACTOR, ROLLOUT, ConfigProblem
from verl.config.schema import Config
from verl.config.schema.rules import is_custom_function

_LOSS = f"{ACTOR}.policy_loss"
_KL = "algorithm.kl_ctrl"
_GROUP_ESTIMATORS = (
    *("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg"),
    "reinforce_plus_plus_baseline",
)
"""Estimators that compare a response with its group; in a group of one, the advantage is the raw score or zero."""


def find_conflicts(config: Config) -> Iterator[ConfigProblem]:
    """Yield settings of the algorithm that cannot work together."""
    loss, trainer, control = config.actor_rollout_ref.actor.policy_loss, config.trainer, config.algorithm.kl_ctrl
    yield from _check_group_size(config)
    yield from _check_critic(config)
    if loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
        yield ConfigProblem.at(
            f"{_LOSS}.clip_cov_lb",
            f"{loss.clip_cov_lb} must be below clip_cov_ub={loss.clip_cov_ub}; "
            f"set {_LOSS}.clip_cov_lb={loss.clip_cov_ub - 4}",
            *(f"{_LOSS}.clip_cov_ub", f"{_LOSS}.loss_mode"),
        )
    overlong, longest = config.reward.overlong_buffer, config.data.max_response_length
    if overlong.enable and not 1 <= overlong.len <= longest:
        yield ConfigProblem.at(
            "reward.overlong_buffer.len",
            f"{overlong.len} must be 1 to data.max_response_length={longest}; "
            f"set reward.overlong_buffer.len={max(1, longest // 5)}",
            *("reward.overlong_buffer.enable", "data.max_response_length"),
        )
    steps = trainer.total_training_steps
    if uses_critic(config) and steps is not None and trainer.critic_warmup >= steps:
        yield ConfigProblem.at(
            "trainer.critic_warmup",
            f"{trainer.critic_warmup} must be below trainer.total_training_steps={steps}, or the policy is never "
            f"trained; set trainer.critic_warmup={steps // 10}",
            *("trainer.total_training_steps", "algorithm.adv_estimator"),
        )
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    # The controller changes its coefficient by up to 0.2 * samples / horizon of it, so it could become negative.
    if config.algorithm.use_kl_in_reward and control.type == "adaptive" and 0.2 * samples >= control.horizon:
        yield ConfigProblem.at(
            f"{_KL}.horizon",
            f"{control.horizon:g} must be above a fifth of the {samples} samples of a step, or the KL coefficient can "
            f"become negative; set {_KL}.horizon={10 * samples}",
            *("data.train_batch_size", f"{ROLLOUT}.n", f"{_KL}.type"),
        )
    if config.reward.prime.enable:
        yield from _check_prime(config)


def _check_group_size(config: Config) -> Iterator[ConfigProblem]:
    """Check that there are two responses per prompt where they are compared."""
    n, algorithm = config.actor_rollout_ref.rollout.n, config.algorithm
    reasons = []
    if uses_preferences(config):
        reasons.append((f"{_LOSS}.loss_mode", config.actor_rollout_ref.actor.policy_loss.loss_mode))
    elif algorithm.adv_estimator == "grpo_passk":
        reasons.append(("algorithm.adv_estimator", algorithm.adv_estimator))
    if algorithm.filter_groups.enable:
        reasons.append(("algorithm.filter_groups.enable", "true"))
    if reasons and n < 2:
        shown = " and ".join(f"{key}={value}" for key, value in reasons)
        yield ConfigProblem.at(
            f"{ROLLOUT}.n",
            f"{n} must be at least 2 with {shown}, since responses to the same prompt are compared; set {ROLLOUT}.n=8",
            *(key for key, _ in reasons),
        )


def _check_critic(config: Config) -> Iterator[ConfigProblem]:
    """Check critic.enable: gae requires a critic, and only gae and custom estimators return targets for it."""
    enable, estimator = config.critic.enable, config.algorithm.adv_estimator
    if enable is None or is_custom_function(estimator) or uses_preferences(config) or enable == (estimator == "gae"):
        return
    reason = "returns nothing to train it on" if enable else "requires its values"
    yield ConfigProblem.at(
        "critic.enable",
        f"{str(enable).lower()}, but algorithm.adv_estimator={estimator} {reason}; remove critic.enable, or set "
        f"algorithm.adv_estimator={'gae' if enable else 'grpo'}",
        "algorithm.adv_estimator",
    )


def _check_prime(config: Config) -> Iterator[ConfigProblem]:
    estimator, mode = config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if uses_preferences(config):
        yield ConfigProblem.at(
            "reward.prime.enable",
            f"true gives rewards per token, but {_LOSS}.loss_mode={mode} uses only whole responses; "
            f"set {_LOSS}.loss_mode=vanilla",
            f"{_LOSS}.loss_mode",
        )
    elif estimator not in ("rloo", "rloo_vectorized") and not is_custom_function(estimator):
        yield ConfigProblem.at(
            "reward.prime.enable",
            f"true requires leave-one-out baselines, which algorithm.adv_estimator={estimator} does not have; "
            "set algorithm.adv_estimator=rloo",
            "algorithm.adv_estimator",
        )


def find_hints(config: Config) -> Iterator[ConfigProblem]:
    """Yield settings of the algorithm that work but are probably a mistake."""
    algorithm, actor, n = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    if algorithm.adv_estimator in _GROUP_ESTIMATORS and n < 2 and not uses_preferences(config):
        yield ConfigProblem.at(
            f"{ROLLOUT}.n",
            f"{n} response per prompt leaves algorithm.adv_estimator={algorithm.adv_estimator} no group to compare "
            f"with: advantages are the raw scores, or zero; set {ROLLOUT}.n=8",
            "algorithm.adv_estimator",
        )
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield ConfigProblem.at(
            "algorithm.use_kl_in_reward",
            f"with {ACTOR}.use_kl_loss=true the KL to the reference counts twice; set algorithm.use_kl_in_reward=false "
            "to keep only that of the loss",
            f"{ACTOR}.use_kl_loss",
        )
    for switch, key, is_unused in (
        (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", actor.use_kl_loss and actor.kl_loss_coef == 0),
        ("algorithm.use_kl_in_reward", f"{_KL}.kl_coef", algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0),
    ):
        if is_unused:
            yield ConfigProblem.at(
                key, f"with 0 the KL to the reference is computed but not used; set {switch}=false", switch
            )
