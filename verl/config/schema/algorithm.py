"""`algorithm.*`: from scores to advantages."""

from __future__ import annotations

from typing import Literal

from verl.config.schema.actor import KlKind
from verl.config.schema.base import CustomFunction, Section, section, setting

__all__ = ["AlgorithmConfig"]

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
    "gpg",
    "grpo_passk",
]


class KlControlConfig(Section):
    type: Literal["fixed", "adaptive"] = setting("fixed", "Keep kl_coef, or steer it towards target_kl.")
    kl_coef: float = setting(0.001, "Weight of the KL penalty in the reward.", ge=0)
    horizon: int = setting(10000, "How slowly the adaptive controller moves.", unit="samples", ge=1)
    target_kl: float = setting(0.1, "KL that the adaptive controller aims at.", unit="nats", gt=0)


class FilterGroupsConfig(Section):
    enable: bool = setting(False, "Drop groups whose scores are all equal, and draw others (dynamic sampling).")
    metric: str = setting("score", "Which number must differ within a group.")
    max_num_gen_batches: int = setting(10, "Give up after so many batches; 0: never.", unit="batches", ge=0)


class RolloutCorrectionConfig(Section):
    rollout_is: Literal["token", "sequence"] | None = setting(None, "Importance weights per token or per sequence.")
    rollout_is_threshold: float = setting(2.0, "Weights are cut off above this.", gt=0)
    rollout_is_batch_normalize: bool = setting(False, "Scale the weights to a mean of 1.")
    rollout_rs: Literal["token", "sequence", "geometric"] | None = setting(
        None, "Reject tokens or sequences that differ too much; geometric: by the mean ratio of a sequence."
    )
    rollout_rs_threshold: float = setting(2.0, "Largest ratio that is kept.", gt=1)
    rollout_rs_threshold_lower: float | None = setting(None, "Smallest; null: 1 / rollout_rs_threshold.", gt=0, lt=1)


class AlgorithmConfig(Section):
    adv_estimator: Estimator | CustomFunction = setting("grpo", "Advantage estimator.")
    gamma: float = setting(1.0, "Discount of later rewards (gae, reinforce_plus_plus).", ge=0, le=1)
    lam: float = setting(1.0, "Lambda of gae.", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = setting(True, "Divide by the group's standard deviation; false: Dr.GRPO.")
    use_kl_in_reward: bool = setting(False, "Subtract the KL to the reference from the reward.")
    kl_penalty: KlKind = setting("kl", "Estimator of that KL; full: exact over the vocabulary.")
    kl_ctrl: KlControlConfig = section(KlControlConfig, "Weight of the KL in the reward.")
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "Dynamic sampling (DAPO).")
    rollout_correction: RolloutCorrectionConfig = section(
        RolloutCorrectionConfig, "Correction of the mismatch between engine and trainer."
    )
