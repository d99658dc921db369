"""`algorithm.*`: advantages from rewards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from verl.config.schema.actor import KlKind
from verl.config.schema.base import Count, CustomFunction, Fraction, Positive, Section, section, setting
from verl.config.schema.conditions import HAS_ADVANTAGES, OnlyIf, is_custom_function, needs, needs_given

Estimator = Literal[
    "grpo",
    "grpo_vectorized",
    "gae",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "gpg",
    "gdpo",
    "grpo_passk",
]


RejectionKind = Literal[
    "token", "sequence", "geometric", "token_k2", "token_k3", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"
]

_ADAPTIVE = needs(".type", "adaptive", reason="{section}.type=fixed keeps kl_coef constant")
_KL_IN_REWARD = needs(
    "algorithm.use_kl_in_reward",
    reason="algorithm.use_kl_in_reward=false; set it to true, or set actor_rollout_ref.actor.use_kl_loss=true and "
    "actor_rollout_ref.actor.kl_loss_coef",
)
_DISCOUNTS = OnlyIf(
    (".adv_estimator", "reward.prime.enable"),
    lambda estimator, prime: prime or estimator in ("gae", "reinforce_plus_plus") or is_custom_function(estimator),
    "only {section}.adv_estimator=gae or reinforce_plus_plus, and PRIME, use it",
)


class KlControlConfig(Section):
    type: Literal["fixed", "adaptive"] = setting("fixed")
    """fixed: keep kl_coef; adaptive: adjust it toward target_kl."""
    kl_coef: float = setting(0.001, ge=0)
    """Coefficient of the KL penalty in the reward."""
    horizon: Count = setting(10000, unit="samples", only_if=_ADAPTIVE)
    """Time constant of the adaptive controller."""
    target_kl: Positive = setting(0.1, unit="nats", only_if=_ADAPTIVE)
    """Target KL of the adaptive controller."""


class FilterGroupsConfig(Section):
    enable: bool = setting(False)
    """Replace groups whose scores are all equal by new ones (dynamic sampling)."""
    metric: str = setting("score")
    """The value that must differ within a group."""
    max_num_gen_batches: int = setting(10, unit="batches", ge=0)
    """Maximum batches generated per step; 0: no limit."""


CORRECTION_PRESETS: dict[str, dict[str, Any]] = {
    "tis": {"rollout_is": "token"},
    "tis_sequence": {"rollout_is": "sequence"},
    "mis": {"rollout_rs": "token"},
    "mis_sequence": {"rollout_rs": "sequence"},
    "mis_geometric": {"rollout_rs": "geometric", "rollout_rs_threshold": 1.001},
    "icepop": {"rollout_is": "icepop", "rollout_is_threshold": 5.0, "rollout_is_threshold_lower": 0.5},
    "bypass": {"bypass_mode": True},
}
"""`algorithm.rollout_correction.preset` -> the settings that it stands for; those that are given win."""


class RolloutCorrectionConfig(Section):
    preset: Literal["tis", "tis_sequence", "mis", "mis_sequence", "mis_geometric", "icepop", "bypass"] | None = setting(
        None
    )
    """A usual combination of the settings below, which override it; null: none."""
    rollout_is: Literal["token", "sequence", "icepop"] | None = setting(None)
    """Importance weights per token or per sequence; icepop: per token, 0 outside the bounds; null: none."""
    rollout_is_threshold: Positive = setting(2.0, only_if=needs_given(".rollout_is"))
    """Upper bound of the weights."""
    rollout_is_threshold_lower: Fraction = setting(0.5, only_if=needs(".rollout_is", "icepop"))
    """Lower bound of the weights (icepop)."""
    rollout_is_batch_normalize: bool = setting(False, only_if=needs_given(".rollout_is"))
    """Scale the weights to a mean of 1."""
    rollout_rs: RejectionKind | None = setting(None)
    """Reject tokens or sequences by their ratio (geometric: mean ratio), or by k2 or k3, estimates of the KL."""
    rollout_rs_threshold: Positive = setting(2.0, only_if=needs_given(".rollout_rs"))
    """Largest accepted ratio or estimate."""
    rollout_rs_threshold_lower: float | None = setting(
        None, gt=0, lt=1, only_if=needs(".rollout_rs", "token", "sequence", "geometric")
    )
    """Smallest accepted ratio; null: 1 / rollout_rs_threshold."""
    bypass_mode: bool = setting(False)
    """Take the engine's log-probs as the old ones, which saves a forward pass; the loss then clips the mismatch."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        name = values.get("preset") if isinstance(values, dict) else None
        return CORRECTION_PRESETS.get(name, {}) | values if isinstance(name, str) else values


class AlgorithmConfig(Section):
    adv_estimator: Estimator | CustomFunction = setting("grpo", only_if=HAS_ADVANTAGES)
    """Advantage estimator."""
    gamma: Fraction = setting(1.0, only_if=(HAS_ADVANTAGES, _DISCOUNTS))
    """Discount factor (gae, reinforce_plus_plus, PRIME)."""
    lam: Fraction = setting(1.0, only_if=(HAS_ADVANTAGES, needs(".adv_estimator", "gae")))
    """Lambda of gae."""
    norm_adv_by_std_in_grpo: bool = setting(
        True, only_if=(HAS_ADVANTAGES, needs(".adv_estimator", "grpo", "grpo_vectorized", "grpo_passk"))
    )
    """Divide advantages by the group's standard deviation; false: Dr.GRPO."""
    reward_components: list[str] = setting([], only_if=(HAS_ADVANTAGES, needs(".adv_estimator", "gdpo")))
    """Numbers of the reward that are normalized separately (gdpo); []: the parts that the score is a sum of."""
    component_weights: list[float] | None = setting(None, only_if=(HAS_ADVANTAGES, needs(".adv_estimator", "gdpo")))
    """Weights of reward_components, one for each; null: as in the score, or 1."""
    use_kl_in_reward: bool = setting(False)
    """Subtract the KL divergence from the reference policy from the reward."""
    kl_penalty: KlKind = setting("kl", only_if=_KL_IN_REWARD)
    """Estimator of the KL in the reward; full: exact over the vocabulary."""
    kl_ctrl: KlControlConfig = section(
        KlControlConfig, "Coefficient of the KL penalty in the reward.", only_if=_KL_IN_REWARD
    )
    mask_truncated: bool = setting(False)
    """Do not train on responses cut off by data.max_response_length; they still count in the baseline."""
    filter_groups: FilterGroupsConfig = section(
        FilterGroupsConfig, "Dynamic sampling (DAPO).", only_if=needs("algorithm.filter_groups.enable")
    )
    rollout_correction: RolloutCorrectionConfig = section(
        RolloutCorrectionConfig, "Correction of the mismatch between rollout engine and trainer."
    )
