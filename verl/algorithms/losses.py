"""Policy losses and KL estimates: one function per formula, from log-probs to one value per token, for `aggregate`.

A loss maps `LossInputs` and `LossOptions` to a `PolicyLoss`. To use your own, set
`actor_rollout_ref.actor.policy_loss.loss_mode=package.module:function`.

A = advantage, d = lp - lp_old, r = exp(d), sg = stop gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl.algorithms.aggregate import BranchWeights, segment_ids, segment_sum
from verl.algorithms.settings import Distillation, LossOptions

MAX_LOG_RATIO = 20.0
MAX_SEQUENCE_LOG_RATIO = 10.0


@dataclass(frozen=True, slots=True)
class LossInputs:
    """A micro-batch as a loss sees it: all [T] except `offsets [B+1]`. Only `logprobs` carries a gradient."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    offsets: Tensor
    ref_logprobs: Tensor | None = None
    selected: Tensor | None = None  # bool: tokens that the prepass over the mini-batch has selected
    branches: BranchWeights | None = None  # None: every sequence is an episode
    episode_log_ratio: Tensor | None = None  # the result of `mean_log_ratio`, if episodes have several branches
    rollout_logprobs: Tensor | None = None  # of the engine that sampled the tokens
    episode_lag: Tensor | None = None  # the mean of `lag` over the episode, if episodes have several branches

    @property
    def ratio(self) -> Tensor:
        """r = exp(d), d clamped to +-20."""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    @property
    def lag(self) -> Tensor:
        """lp_roll - lp: how much less likely the policy is to sample a token than the engine was, detached."""
        if self.rollout_logprobs is None:
            raise ValueError("off_policy_mask_threshold: the batch has no rollout_logprobs")
        return (self.rollout_logprobs - self.logprobs).detach()

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return the mean over the generated tokens of each token's sequence: [T] -> [T]."""
        counts = segment_sum(self.mask.to(values.dtype), self.offsets).clamp(min=1.0)
        return self.sequence_sum(values) / counts[segment_ids(self.offsets)]

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Return the sum over the generated tokens of each token's sequence: [T] -> [T]."""
        return segment_sum(torch.where(self.mask, values, 0.0), self.offsets)[segment_ids(self.offsets)]

    @property
    def episode_tokens(self) -> Tensor:
        """[T]: generated tokens of the whole episode."""
        return self.sequence_sum(torch.ones_like(self.logprobs)) if self.branches is None else self.branches.tokens

    def mean_log_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return the mean of a log-ratio over the generated tokens of each token's episode: [T] -> [T], detached.

        The other branches of an episode may be on other ranks: their mean comes from the prepass.
        """
        return self.sequence_mean(log_ratio).detach() if self.episode_log_ratio is None else self.episode_log_ratio


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of each token, and where a clip removed its gradient, all [T]."""

    loss: Tensor
    clipped_high: Tensor | None = None
    clipped_low: Tensor | None = None
    clipped_dual: Tensor | None = None


LossFunction = Callable[[LossInputs, LossOptions], PolicyLoss]


def vanilla(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """PPO: max(-A*r, -A*clip(r, 1-low, 1+high)); at most -A*c where A < 0 (dual clip)."""
    plain = _clip(x.ratio, x.advantages, o)
    ceiling = -x.advantages * o.clip_c
    dual = (x.advantages < 0) & (plain.loss > ceiling)
    return replace(plain, loss=torch.where(dual, ceiling, plain.loss), clipped_dual=dual)


def gspo(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """PPO's clip on the ratio of whole sequences, exp(mean d); per token exp(sg[mean d] + lp - sg[lp])."""
    log_ratio = x.mean_log_ratio(x.logprobs - x.old_logprobs) + x.logprobs - x.logprobs.detach()
    return _clip(log_ratio.clamp(max=MAX_SEQUENCE_LOG_RATIO).exp(), x.advantages, o)


def cispo(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """-sg[clip(r, 1-low, 1+high)] * A * lp: the clip limits a token's weight but never removes its gradient."""
    ratio = x.ratio.detach()
    weight = ratio.clamp(1.0 - o.clip_low, 1.0 + o.clip_high)
    return PolicyLoss(-weight * x.advantages * x.logprobs, ratio > weight, ratio < weight)


def dppo_tv(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """DPPO: -sg[min(r, c)] * A * lp, where p - p_old, the binary TV, stays in [-low, high] on the side of A."""
    distance = (x.logprobs.exp() - x.old_logprobs.exp()).detach()
    return _trust(x, o, distance > o.clip_high, distance < -o.clip_low)


def dppo_kl(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """DPPO with the binary KL from p_old to p, of this token against all others, at most low or high."""
    new, old = (each.detach().clamp(max=-1e-6) for each in (x.logprobs, x.old_logprobs))
    rest, rest_old = torch.log1p(-new.exp()), torch.log1p(-old.exp())
    divergence = old.exp() * (old - new) + rest_old.exp() * (rest_old - rest)
    return _trust(x, o, (divergence > o.clip_high) & (new > old), (divergence > o.clip_low) & (new < old))


def sapo(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """-A * sigmoid(tau * (r - 1)) * 4/tau, tau_pos where A > 0 and tau_neg elsewhere: a soft clip."""
    tau = torch.full_like(x.advantages, o.tau_neg).masked_fill(x.advantages > 0, o.tau_pos)
    return PolicyLoss(-x.advantages * torch.sigmoid(tau * (x.ratio - 1.0)) * 4.0 / tau)


def geo_mean(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """GMPO: -A * exp(mean d) per sequence, d clipped to [-low, high] on the side that the advantage pushes to.

    Per token -A * exp(sg[mean d]) * (1 + d - sg[d]), whose mean over the sequence has the same value and gradient.
    """
    log_ratio, clipped = x.logprobs - x.old_logprobs, clip_log_ratio(x, o)
    is_clipped = (clipped != log_ratio) & (x.advantages != 0)
    mean = x.mean_log_ratio(clipped)
    slope = torch.where(mean.abs() <= MAX_LOG_RATIO, clipped - clipped.detach(), 0.0)
    loss = -x.sequence_mean(x.advantages) * mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * (1.0 + slope)
    return PolicyLoss(loss, is_clipped & (log_ratio > 0), is_clipped & (log_ratio < 0))


def clip_log_ratio(x: LossInputs, o: LossOptions) -> Tensor:
    """Return d, clipped to [-low, high] on the side that the mean advantage of its sequence pushes to: [T]."""
    log_ratio, sign = x.logprobs - x.old_logprobs, x.sequence_mean(x.advantages).sign()
    return sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-o.clip_low, o.clip_high))


def gpg(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """-A * lp."""
    return PolicyLoss(-x.advantages * x.logprobs)


def clip_cov(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """PPO's clip without the dual one; `selected` tokens, a share of those with a high cov(A, lp), have no gradient."""
    plain = _clip(x.ratio, x.advantages, o)
    return replace(plain, loss=torch.where(_get_selected(x), plain.loss.detach(), plain.loss))


def kl_cov(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """-A*r, plus coef * |d| on the `selected` tokens, those with the highest cov(A, lp)."""
    distance = (x.logprobs - x.old_logprobs).abs()
    return PolicyLoss(-x.advantages * x.ratio + torch.where(_get_selected(x), o.ppo_kl_coef * distance, 0.0))


def dpo(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """-2 * A * n * lp, n tokens per response, with the gradient of -log sigmoid(margin), averaged over pairs.

    The prepass sets A = +-beta * sigmoid(-margin) for the better and the worse response of a pair.
    """
    return PolicyLoss(-2.0 * x.advantages * x.episode_tokens * x.logprobs)


def sppo(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """(sum d - eta * A)^2 per sequence, A being the win rate of the response in its group minus 1/2.

    With e = sg[sum d] - eta * A, per token e^2 + 2 * e * n * (lp - sg[lp]): the mean has the same value and gradient.
    """
    tokens = x.episode_tokens
    error = tokens * x.mean_log_ratio(x.logprobs - x.old_logprobs) - o.sppo_eta * x.advantages
    return PolicyLoss(error.square() + 2.0 * error * tokens * (x.logprobs - x.logprobs.detach()))


LOSSES: dict[str, LossFunction] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "sapo": sapo,
    "geo_mean": geo_mean,
    "gpg": gpg,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dpo": dpo,
    "sppo": sppo,
}
"""`actor.policy_loss.loss_mode` -> function."""

PER_SEQUENCE = ("gspo", "sapo", "geo_mean", "dpo", "sppo")
"""Losses whose formula is a mean over sequences: always aggregated by seq-mean-token-mean."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """0.5 * max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2), and where the clip removed the gradient."""
    plain = (values - returns).square()
    clipped = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), clipped > plain


def find_off_policy(x: LossInputs, threshold: float) -> Tensor:
    """Return the tokens with A < 0 of responses whose mean lp_roll - lp is above the threshold: [T] bool."""
    lag = x.sequence_mean(x.lag) if x.episode_lag is None else x.episode_lag
    return (x.advantages < 0) & (lag > threshold)


UNBIASED_KL = "unbiased"
"""k3 weighted by the ratio: its gradient is that of the true KL, also for tokens of an older policy (loss only)."""

EXACT_KL = "full"
"""The exact KL, summed over the whole vocabulary: `verl.training.kernels.logprobs.vocabulary_kl`."""

KL_KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""Accepted name -> estimator of the KL."""


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Return the KL estimate of each token [T], with x = lp_ref - lp.

    `k1`: -x; `abs`: |x|; `k2`: x^2/2; `k3`: exp(x)-x-1 with x clamped to +-20 and the value to +-10. A trailing `+`
    keeps that value but takes the gradient of `k2`, whose expectation is the gradient of the true KL.
    """
    name = kind.removesuffix("+")
    if name not in KL_KINDS:
        raise ValueError(f"kl_loss_type: {kind!r} is not one of {', '.join(KL_KINDS)}, each with or without '+'")
    value = _estimate_kl(logprobs, ref_logprobs, KL_KINDS[name])
    if not kind.endswith("+"):
        return value
    k2 = _estimate_kl(logprobs, ref_logprobs, "k2")
    return value.detach() + k2 - k2.detach()


def estimate_teacher_kl(logprobs: Tensor, teacher_logprobs: Tensor, o: Distillation) -> Tensor:
    """Return lp - lp_teacher of each token [T], both at least `log_prob_min_clamp`."""
    if o.log_prob_min_clamp is not None:
        logprobs, teacher_logprobs = (each.clamp(min=o.log_prob_min_clamp) for each in (logprobs, teacher_logprobs))
    return kl_penalty(logprobs, teacher_logprobs, "k1")


def clamp_teacher_kl(kl: Tensor, o: Distillation) -> tuple[Tensor, Tensor | None]:
    """Return the KL of each token [T] within +-`loss_max_clamp`, and where that removed its gradient; None: nowhere."""
    if o.loss_max_clamp is None:
        return kl, None
    return kl.clamp(-o.loss_max_clamp, o.loss_max_clamp), kl.detach().abs() > o.loss_max_clamp


def _estimate_kl(logprobs: Tensor, ref_logprobs: Tensor, name: str) -> Tensor:
    x = ref_logprobs - logprobs
    if name == "k1":
        return -x
    if name == "abs":
        return x.abs()
    if name == "k2":
        return 0.5 * x.square()
    x = x.clamp(-20.0, 20.0)
    return (x.exp() - x - 1.0).clamp(-10.0, 10.0)


def _clip(ratio: Tensor, advantages: Tensor, o: LossOptions) -> PolicyLoss:
    plain = -advantages * ratio
    loss = torch.maximum(plain, -advantages * ratio.clamp(1.0 - o.clip_low, 1.0 + o.clip_high))
    is_clipped = loss > plain
    return PolicyLoss(loss, is_clipped & (ratio > 1.0), is_clipped & (ratio < 1.0))


def _trust(x: LossInputs, o: LossOptions, too_high: Tensor, too_low: Tensor) -> PolicyLoss:
    """-sg[min(r, c)] * A * lp, without the tokens that are too high where A > 0, or too low where A < 0."""
    high, low = too_high & (x.advantages > 0), too_low & (x.advantages < 0)
    loss = -x.ratio.detach().clamp(max=o.clip_c) * x.advantages * x.logprobs
    return PolicyLoss(torch.where(high | low, 0.0, loss), high, low)


def _get_selected(x: LossInputs) -> Tensor:
    if x.selected is None:
        raise ValueError("clip_cov, kl_cov: no tokens are selected; run the prepass over the mini-batch first")
    return x.selected
