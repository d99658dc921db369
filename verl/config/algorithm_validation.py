"""The settings of the algorithm against each other: what cannot work, and what is probably not meant."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.features import is_custom_function, uses_critic, uses_preferences
from verl.config.problems import ACTOR, ROLLOUT, ConfigProblem
from verl.config.schema import Config

__all__ = ["find_conflicts", "find_hints"]

_LOSS = f"{ACTOR}.policy_loss"
_IN_GROUPS = (
    "grpo",
    "grpo_vectorized",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
)
"""Estimators that compare an answer with the others to its prompt; alone, it keeps its score, or gets zero."""


def find_conflicts(config: Config) -> Iterator[ConfigProblem]:
    """Settings of the algorithm that cannot work together."""
    loss, trainer = config.actor_rollout_ref.actor.policy_loss, config.trainer
    yield from _lonely_answers(config)
    yield from _critic_without_use(config)
    if loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
        yield ConfigProblem(
            (f"{_LOSS}.clip_cov_lb", f"{_LOSS}.clip_cov_ub", f"{_LOSS}.loss_mode"),
            f"{_LOSS}.clip_cov_lb: {loss.clip_cov_lb} must be below clip_cov_ub={loss.clip_cov_ub}; "
            f"set {_LOSS}.clip_cov_lb={loss.clip_cov_ub - 4}",
        )
    overlong, longest = config.reward.overlong_buffer, config.data.max_response_length
    if overlong.enable and not 1 <= overlong.len <= longest:
        yield ConfigProblem(
            ("reward.overlong_buffer.len", "reward.overlong_buffer.enable", "data.max_response_length"),
            f"reward.overlong_buffer.len: {overlong.len} must be 1 to data.max_response_length={longest}; "
            f"set reward.overlong_buffer.len={max(1, longest // 5)}",
        )
    steps = trainer.total_training_steps
    if uses_critic(config) and steps is not None and trainer.critic_warmup >= steps:
        yield ConfigProblem(
            ("trainer.critic_warmup", "trainer.total_training_steps", "algorithm.adv_estimator"),
            f"trainer.critic_warmup: {trainer.critic_warmup} must be below trainer.total_training_steps={steps}, or "
            f"the policy is never trained; set trainer.critic_warmup={steps // 10}",
        )
    yield from _overshooting_kl(config)
    if config.reward.prime.enable:
        yield from _process_rewards_unused(config)


def _overshooting_kl(config: Config) -> Iterator[ConfigProblem]:
    """An adaptive weight of the KL that changes by more than itself in one step turns negative: KL is then rewarded."""
    control, samples = config.algorithm.kl_ctrl, config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    if config.algorithm.use_kl_in_reward and control.type == "adaptive" and 0.2 * samples >= control.horizon:
        yield ConfigProblem(
            ("algorithm.kl_ctrl.horizon", "data.train_batch_size", f"{ROLLOUT}.n", "algorithm.kl_ctrl.type"),
            f"algorithm.kl_ctrl.horizon: {control.horizon:g} must be above a fifth of the {samples} answers of a step, "
            f"or the weight of the KL turns negative; set algorithm.kl_ctrl.horizon={10 * samples}",
        )


def _lonely_answers(config: Config) -> Iterator[ConfigProblem]:
    """What compares the answers to a prompt needs at least two of them."""
    n, algorithm = config.actor_rollout_ref.rollout.n, config.algorithm
    needs = []
    if uses_preferences(config):
        needs.append((f"{_LOSS}.loss_mode", config.actor_rollout_ref.actor.policy_loss.loss_mode))
    elif algorithm.adv_estimator == "grpo_passk":
        needs.append(("algorithm.adv_estimator", algorithm.adv_estimator))
    if algorithm.filter_groups.enable:
        needs.append(("algorithm.filter_groups.enable", "true"))
    if needs and n < 2:
        why = " and ".join(f"{key}={value}" for key, value in needs)
        yield ConfigProblem(
            (f"{ROLLOUT}.n", *(key for key, _ in needs)),
            f"{ROLLOUT}.n: {n} must be at least 2 with {why}: answers to the same prompt are compared; "
            f"set {ROLLOUT}.n=8",
        )


def _critic_without_use(config: Config) -> Iterator[ConfigProblem]:
    """A critic is for those that return what it is trained on: gae, which needs it, and functions of the user."""
    wanted, estimator = config.critic.enable, config.algorithm.adv_estimator
    if wanted is None or is_custom_function(estimator) or uses_preferences(config) or wanted == (estimator == "gae"):
        return
    why = "gives no returns to train it on" if wanted else "needs its values"
    yield ConfigProblem(
        ("critic.enable", "algorithm.adv_estimator"),
        f"critic.enable: {str(wanted).lower()}, but algorithm.adv_estimator={estimator} {why}; leave critic.enable "
        f"out, or set algorithm.adv_estimator={'gae' if wanted else 'grpo'}",
    )


def _process_rewards_unused(config: Config) -> Iterator[ConfigProblem]:
    estimator = config.algorithm.adv_estimator
    if uses_preferences(config):
        mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
        yield ConfigProblem(
            ("reward.prime.enable", f"{_LOSS}.loss_mode"),
            f"reward.prime.enable: true rewards tokens, and {_LOSS}.loss_mode={mode} sees whole answers alone; "
            f"set {_LOSS}.loss_mode=vanilla",
        )
    elif estimator not in ("rloo", "rloo_vectorized") and not is_custom_function(estimator):
        yield ConfigProblem(
            ("reward.prime.enable", "algorithm.adv_estimator"),
            f"reward.prime.enable: true needs returns with leave-one-out baselines, and algorithm.adv_estimator="
            f"{estimator} has others; set algorithm.adv_estimator=rloo",
        )


def find_hints(config: Config) -> Iterator[ConfigProblem]:
    """What the algorithm can do, but is probably not meant to."""
    algorithm, actor, n = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    if algorithm.adv_estimator in _IN_GROUPS and n < 2 and not uses_preferences(config):
        yield ConfigProblem(
            (f"{ROLLOUT}.n", "algorithm.adv_estimator"),
            f"{ROLLOUT}.n: {n} answer a prompt leaves algorithm.adv_estimator={algorithm.adv_estimator} no group to "
            f"compare with: its advantages are the raw scores, or zero; set {ROLLOUT}.n=8",
        )
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield ConfigProblem(
            ("algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss"),
            f"algorithm.use_kl_in_reward: with {ACTOR}.use_kl_loss=true the KL to the reference counts twice; "
            "set algorithm.use_kl_in_reward=false to keep that of the loss",
        )
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0:
        yield ConfigProblem(
            ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"),
            "algorithm.kl_ctrl.kl_coef: 0 computes the KL to the reference for nothing, also if adaptive; "
            "set algorithm.use_kl_in_reward=false",
        )
