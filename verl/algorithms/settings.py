"""Settings of the algorithms, as plain records. Imports no torch, because the controller creates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class EstimatorOptions:
    """`algorithm.gamma`, `lam`, `norm_adv_by_std_in_grpo`, `component_weights`, `gigpo`; numbers of `reward.prime`."""

    gamma: float = 1.0
    lam: float = 1.0
    by_std: bool = True
    outcome_coef: float = 5.0
    process_coef: float = 5.0
    step_weight: float = 1.0  # of gigpo
    component_weights: Mapping[str, float] = field(default_factory=dict)  # by name of the reward component


@dataclass(frozen=True, slots=True)
class LossOptions:
    """`actor.clip_ratio_*` and `actor.policy_loss.*`."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float = 2e-4
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 2e-4
    ppo_kl_coef: float = 0.1
    dpo_beta: float = 0.1
    sppo_eta: float = 1.0
    off_policy_mask_threshold: float | None = None  # None: no sequence is dropped for being off-policy


@dataclass(frozen=True, slots=True)
class Rejection:
    """A criterion of rejection: tokens or sequences whose statistic is outside [lower, upper] are not trained on."""

    kind: str  # see correction.py
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class Correction:
    """`algorithm.rollout_correction`: importance weights (`weigh`), off if None, and criteria of rejection.

    With `bypass` the engine's log-probs serve as the old ones. Weights and rejection then compare the engine with the
    policy at the start of each update.
    """

    weigh: str | None = None  # token, sequence
    threshold: float = 2.0
    threshold_lower: float | None = None  # weights outside [threshold_lower, threshold] are 0; None: min(w, threshold)
    normalize: bool = False
    reject: tuple[Rejection, ...] = ()
    bypass: bool = False


@dataclass(frozen=True, slots=True)
class KlController:
    """The coefficient of the KL in the reward: constant, or `adaptive` towards `target`.

    After each use: beta *= 1 + clip(KL / target - 1, -0.2, 0.2) * samples / horizon.
    """

    beta: float
    adaptive: bool = False
    target: float = 0.1
    horizon: float = 10_000.0

    def after(self, kl: float, samples: int) -> KlController:
        """Return the controller of the next step, given the mean KL and the number of samples of this one."""
        if not self.adaptive:
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, beta=self.beta * (1.0 + error * samples / self.horizon))


@dataclass(frozen=True, slots=True)
class Distillation:
    """`distillation`: the KL to a teacher, in the advantages ("reward") or over the vocabulary in the loss ("loss")."""

    mode: str = "reward"
    coef: float = 1.0
    log_prob_min_clamp: float | None = None  # log-probs of both models below it count as it
    loss_max_clamp: float | None = None  # bound of a token's KL, above and below 0
    loss_mode: str = "full"  # of mode "loss": full (from the policy to the teacher), forward_kl, forward_kl_topk
    topk: int | None = None  # the most likely tokens of the teacher over which forward_kl_topk sums


@dataclass(frozen=True, slots=True)
class AlgorithmSettings:
    """A complete algorithm: from scores to rewards, to advantages, to the loss."""

    estimator: str = "grpo"  # a key of ESTIMATORS, or package.module:function
    estimator_options: EstimatorOptions = field(default_factory=EstimatorOptions)
    loss_mode: str = "vanilla"  # a key of LOSSES, or package.module:function
    loss_options: LossOptions = field(default_factory=LossOptions)
    agg_mode: str = "token-mean"
    scale: float | None = None  # the length L of seq-mean-token-sum-norm
    entropy_coeff: float = 0.0
    loss_kl_coef: float | None = None  # None: no KL in the loss
    loss_kl_type: str = "low_var_kl"
    reward_kl: KlController | None = None  # None: no KL in the reward
    reward_kl_type: str = "kl"
    distillation: Distillation | None = None  # None: no teacher
    correction: Correction = field(default_factory=Correction)
    value_clip: float = 0.5
    value_agg_mode: str = "token-mean"
    critic_warmup: int = 0  # steps that train only the critic
    mask_truncated: bool = False  # responses that the length limit cut off count in the baseline, but are not trained
    ref_update_ratio: float = 1.0  # EMA weight of the policy at each update of the reference; 1: a copy
    ref_update_freq: int = -1  # steps after which the policy's weights are copied to the reference; -1: never
    prime_beta: float = 0.05  # PRIME: a token's reward is beta * its log-ratio under the reward model
