"""`algorithm.*`: advantages from rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

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
    "gigpo",
    "grpo_passk",
]


RejectionKind = Literal[
    "token",
    "sequence",
    "geometric",
    "token_k2",
    "token_k3",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
RATIOS = ("token", "sequence", "geometric")
"""Kinds of rejection that compare a ratio, which has two bounds; the others compare an estimate of the KL."""

_SYNONYMS: dict[str, str] = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}


def _split_kinds(value: Any) -> Any:
    return [kind.strip() for kind in value.split(",")] if isinstance(value, str) else value


def _check_ranges(value: str) -> str:
    parts = [part.split("_") for part in value.split(",")]
    for part in parts:
        numbers = [float(number) for number in part]
        if len(numbers) > 2 or min(numbers) <= 0 or numbers != sorted(numbers):
            raise ValueError(f"{'_'.join(part)} must be a positive number, or two as lower_upper")
    return value


_Kinds = list[RejectionKind | Literal["token_k1", "seq_sum_k1", "seq_mean_k1"]]
Rejections = Annotated[_Kinds, BeforeValidator(_split_kinds, json_schema_input_type=str | _Kinds)]
"""Kinds of rejection; also as text, separated by commas."""

Ranges = Annotated[str, AfterValidator(_check_ranges)]
"""Numbers or ranges such as 0.5_2.0, separated by commas."""

_ADAPTIVE = needs(".type", "adaptive", reason="{section}.type=fixed keeps kl_coef constant")
_KL_IN_REWARD = needs(
    "algorithm.use_kl_in_reward",
    reason="algorithm.use_kl_in_reward=false; set it to true, or set actor_rollout_ref.actor.use_kl_loss=true and "
    "actor_rollout_ref.actor.kl_loss_coef",
)
_DISCOUNTS = OnlyIf(
    (".adv_estimator", "reward.prime.enable"),
    lambda estimator, prime: (
        prime or estimator in ("gae", "reinforce_plus_plus", "gigpo") or is_custom_function(estimator)
    ),
    "only {section}.adv_estimator=gae, reinforce_plus_plus or gigpo, and PRIME, use it",
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


class GigpoConfig(Section):
    step_advantage_w: float = setting(1.0, ge=0)
    """Weight of the advantage of a turn, next to that of its episode."""


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


_HAS_WEIGHTS = OnlyIf(
    (".rollout_is", "trainer.max_staleness"),
    lambda kind, staleness: kind is not None and (kind != "auto" or staleness > 0),
    "{section}.rollout_is is not given",
)
_COMPARES_RATIOS = OnlyIf(
    (".rollout_rs",),
    lambda kinds: any(kind in RATIOS or kind in _SYNONYMS for kind in kinds or ()),
    "only {section}.rollout_rs=token, sequence or geometric uses it",
)


class RolloutCorrectionConfig(Section):
    preset: Literal["tis", "tis_sequence", "mis", "mis_sequence", "mis_geometric", "icepop", "bypass"] | None = setting(
        None
    )
    """A usual combination of the settings below, which override it; null: none."""
    rollout_is: Literal["auto", "token", "sequence", "icepop"] | None = setting("auto")
    """Importance weights; icepop: token, 0 outside the bounds; auto: token if trainer.max_staleness > 0; null: none."""
    rollout_is_threshold: Positive | Ranges = setting(2.0, only_if=_HAS_WEIGHTS)
    """Upper bound of the weights; as a range such as 0.5_4.0, in quotes in YAML: weights outside are 0."""
    rollout_is_threshold_lower: Fraction = setting(0.5, only_if=needs(".rollout_is", "icepop"))
    """Lower bound of the weights (icepop)."""
    rollout_is_batch_normalize: bool = setting(False, only_if=_HAS_WEIGHTS)
    """Scale the weights to a mean of 1."""
    rollout_rs: Rejections | None = setting(None)
    """Criteria of rejection: ratio of the token, sequence or geometric mean; or k2 or k3, estimates of the KL."""
    rollout_rs_threshold: Positive | Ranges = setting(2.0, only_if=needs_given(".rollout_rs"))
    """Largest accepted ratio or estimate, or a range such as 0.5_2.0; for all criteria, or one each: 2.0,0.1."""
    rollout_rs_threshold_lower: float | None = setting(None, gt=0, lt=1, only_if=_COMPARES_RATIOS)
    """Smallest accepted ratio where rollout_rs_threshold has none; null: 1 / the largest."""
    bypass_mode: bool = setting(False)
    """Take the engine's log-probs as the old ones, which saves a forward pass; the loss then clips the mismatch."""
    loss_type: Literal["ppo_clip", "reinforce"] = setting("ppo_clip", only_if=needs(".bypass_mode"))
    """ppo_clip: policy_loss.loss_mode, with a ratio to the engine; reinforce: -A * lp, weighted by rollout_is."""

    @property
    def has_ratio_to_engine(self) -> bool:
        """Whether the ratio of the loss is that of the policy to the engine, which the loss clips."""
        return self.bypass_mode and self.loss_type == "ppo_clip"

    def list_rejections(self) -> list[tuple[str, float, float]]:
        """Return (kind, lower bound, upper bound) of each criterion."""
        kinds = [_SYNONYMS.get(kind, kind) for kind in self.rollout_rs or []]
        ranges = str(self.rollout_rs_threshold).split(",")
        if len(ranges) == 1:
            ranges *= len(kinds)
        rejections = []
        for kind, bounds in zip(kinds, ranges, strict=True):
            *lower, upper = map(float, bounds.split("_"))
            default = (self.rollout_rs_threshold_lower or 1 / upper) if kind in RATIOS else 0.0
            rejections.append((kind, lower[0] if lower else default, upper))
        return rejections

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        name = values.get("preset") if isinstance(values, dict) else None
        return CORRECTION_PRESETS.get(name, {}) | values if isinstance(name, str) else values


class AlgorithmConfig(Section):
    adv_estimator: Estimator | CustomFunction = setting("grpo", only_if=HAS_ADVANTAGES)
    """Advantage estimator."""
    gamma: Fraction = setting(1.0, only_if=(HAS_ADVANTAGES, _DISCOUNTS))
    """Discount factor (gae, reinforce_plus_plus, PRIME); from turn to turn (gigpo)."""
    lam: Fraction = setting(1.0, only_if=(HAS_ADVANTAGES, needs(".adv_estimator", "gae")))
    """Lambda of gae."""
    norm_adv_by_std_in_grpo: bool = setting(
        True, only_if=(HAS_ADVANTAGES, needs(".adv_estimator", "grpo", "grpo_vectorized", "grpo_passk", "gigpo"))
    )
    """Divide advantages by the group's standard deviation; false: Dr.GRPO."""
    reward_components: list[str] = setting([], only_if=(HAS_ADVANTAGES, needs(".adv_estimator", "gdpo")))
    """Numbers of the reward that are normalized separately (gdpo); []: the parts that the score is a sum of."""
    component_weights: list[float] | None = setting(None, only_if=(HAS_ADVANTAGES, needs(".adv_estimator", "gdpo")))
    """Weights of reward_components, one for each; null: as in the score, or 1."""
    gigpo: GigpoConfig = section(
        GigpoConfig, "Credit for turns (GiGPO).", only_if=(HAS_ADVANTAGES, needs(".adv_estimator", "gigpo"))
    )
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
