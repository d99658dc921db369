"""Settings without effect: of estimators, losses, KL terms and corrections."""

from __future__ import annotations

from verl.config.features import is_custom_function, uses_critic, uses_preferences, uses_reference
from verl.config.ignored.rule import IgnoredRule
from verl.config.problems import ACTOR, REF, ROLLOUT, get_value, list_keys_below, prefix_keys
from verl.config.schema import Config

__all__ = ["ALGORITHM", "POLICY_LOSS"]

_ESTIMATOR, _LOSS = "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"
_CORRECTION = "algorithm.rollout_correction"


def _only(choice: str, *names: str, use: tuple[str, ...]) -> IgnoredRule:
    """Settings that only these estimators or losses use. One of the user's own may use any."""

    def others(config: Config) -> bool:
        chosen = str(get_value(config, choice))
        return chosen not in names and not is_custom_function(chosen)

    return IgnoredRule(use, others, f"only {choice}={' or '.join(names)} uses it", (choice,))


def _aggregates_by_sequence_alone(config: Config) -> bool:
    """Losses that are means over sequences by definition, and no other term of the objective to aggregate."""
    actor = config.actor_rollout_ref.actor
    by_sequence = actor.policy_loss.loss_mode in ("gspo", "geo_mean", "dpo", "sppo")
    return by_sequence and not actor.use_kl_loss and actor.entropy_coeff == 0


ALGORITHM = (
    IgnoredRule(
        (
            *prefix_keys("algorithm", "adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo"),
            *("trainer.critic_warmup", *list_keys_below("critic")),
        ),
        uses_preferences,
        f"{_LOSS}=dpo and sppo compare scores, without advantages",
        (_LOSS,),
    ),
    IgnoredRule(
        ("algorithm.gamma",),
        lambda c: (
            not c.reward.prime.enable
            and c.algorithm.adv_estimator not in ("gae", "reinforce_plus_plus")
            and not is_custom_function(c.algorithm.adv_estimator)
        ),
        f"only {_ESTIMATOR}=gae or reinforce_plus_plus, and PRIME, use it",
        (_ESTIMATOR, "reward.prime.enable"),
    ),
    _only(_ESTIMATOR, "gae", use=("algorithm.lam",)),
    _only(_ESTIMATOR, "grpo", "grpo_vectorized", "grpo_passk", use=("algorithm.norm_adv_by_std_in_grpo",)),
    IgnoredRule(
        ("trainer.critic_warmup", *(key for key in list_keys_below("critic") if key != "critic.enable")),
        lambda c: not uses_critic(c),
        f"only {_ESTIMATOR}=gae trains a critic, or one of your own with critic.enable=true",
        (_ESTIMATOR, "critic.enable"),
    ),
    IgnoredRule(
        ("algorithm.kl_penalty", *list_keys_below("algorithm.kl_ctrl")),
        lambda c: not c.algorithm.use_kl_in_reward,
        f"algorithm.use_kl_in_reward=false; set it to true, or weigh the KL of the loss by {ACTOR}.kl_loss_coef",
        ("algorithm.use_kl_in_reward",),
    ),
    IgnoredRule(
        prefix_keys("algorithm.kl_ctrl", "horizon", "target_kl"),
        lambda c: c.algorithm.kl_ctrl.type != "adaptive",
        "algorithm.kl_ctrl.type=fixed does not steer",
        ("algorithm.kl_ctrl.type",),
    ),
    IgnoredRule(
        prefix_keys("algorithm.filter_groups", "metric", "max_num_gen_batches"),
        lambda c: not c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable=false",
        ("algorithm.filter_groups.enable",),
    ),
    IgnoredRule(
        prefix_keys(_CORRECTION, "rollout_is_threshold", "rollout_is_batch_normalize"),
        lambda c: c.algorithm.rollout_correction.rollout_is is None,
        f"{_CORRECTION}.rollout_is=null",
        (f"{_CORRECTION}.rollout_is",),
    ),
    IgnoredRule(
        prefix_keys(_CORRECTION, "rollout_rs_threshold", "rollout_rs_threshold_lower"),
        lambda c: c.algorithm.rollout_correction.rollout_rs is None,
        f"{_CORRECTION}.rollout_rs=null",
        (f"{_CORRECTION}.rollout_rs",),
    ),
    IgnoredRule(
        prefix_keys("reward.overlong_buffer", "len", "penalty_factor"),
        lambda c: not c.reward.overlong_buffer.enable,
        "reward.overlong_buffer.enable=false",
        ("reward.overlong_buffer.enable",),
    ),
    IgnoredRule(
        tuple(key for key in list_keys_below("reward.prime") if key != "reward.prime.enable"),
        lambda c: not c.reward.prime.enable,
        "reward.prime.enable=false",
        ("reward.prime.enable",),
    ),
)

POLICY_LOSS = (
    _only(
        _LOSS,
        *("vanilla", "gspo", "cispo", "geo_mean", "clip_cov"),
        use=prefix_keys(ACTOR, "clip_ratio", "clip_ratio_low", "clip_ratio_high"),
    ),
    _only(_LOSS, "vanilla", "clip_cov", use=(f"{ACTOR}.clip_ratio_c",)),
    _only(_LOSS, "sapo", use=prefix_keys(f"{ACTOR}.policy_loss", "tau_pos", "tau_neg")),
    _only(_LOSS, "clip_cov", use=prefix_keys(f"{ACTOR}.policy_loss", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")),
    _only(_LOSS, "kl_cov", use=prefix_keys(f"{ACTOR}.policy_loss", "kl_cov_ratio", "ppo_kl_coef")),
    _only(_LOSS, "dpo", use=(f"{ACTOR}.policy_loss.dpo_beta",)),
    _only(_LOSS, "sppo", use=(f"{ACTOR}.policy_loss.sppo_eta",)),
    IgnoredRule(
        prefix_keys(ACTOR, "loss_agg_mode", "loss_scale_factor"),
        _aggregates_by_sequence_alone,
        f"{_LOSS}=gspo, geo_mean, dpo and sppo are means over sequences by definition",
        (_LOSS, *prefix_keys(ACTOR, "use_kl_loss", "entropy_coeff")),
    ),
    IgnoredRule(
        prefix_keys(ACTOR, "loss_scale_factor"),
        lambda c: c.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-sum-norm",
        f"only {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm divides by it",
        (f"{ACTOR}.loss_agg_mode",),
    ),
    IgnoredRule(
        prefix_keys(ACTOR, "clip_ratio"),
        lambda c: None not in (c.actor_rollout_ref.actor.clip_ratio_low, c.actor_rollout_ref.actor.clip_ratio_high),
        "clip_ratio_low and clip_ratio_high are both given",
        prefix_keys(ACTOR, "clip_ratio_low", "clip_ratio_high"),
    ),
    IgnoredRule(
        prefix_keys(ACTOR, "kl_loss_coef", "kl_loss_type"),
        lambda c: not c.actor_rollout_ref.actor.use_kl_loss,
        f"{ACTOR}.use_kl_loss=false",
        (f"{ACTOR}.use_kl_loss",),
    ),
    IgnoredRule(
        ("trainer.ref_update_freq", *list_keys_below(REF)),
        lambda c: not uses_reference(c),
        "there is no reference; use_kl_loss, use_kl_in_reward, loss_mode=dpo or sppo, or reward.prime would make one",
        (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward", _LOSS, "reward.prime.enable"),
    ),
    IgnoredRule(
        prefix_keys(REF, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu"),
        lambda c: True,
        f"the reference is cut as {ROLLOUT}.log_prob_micro_batch_size_per_gpu and log_prob_max_token_len_per_gpu say",
        (),
    ),
)
