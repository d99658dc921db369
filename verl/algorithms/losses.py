"""Policy losses: one function per formula, from log-probs to a loss per token. `aggregate` makes one number of them.

A loss is a function of `LossInputs` and `LossOptions` that returns a `PolicyLoss`. Your own is named by
`actor_rollout_ref.actor.policy_loss.loss_mode=package.module:function`.

A = advantage, d = lp - lp_old, r = exp(d), sg = no gradient through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.aggregate import segment_ids, segment_sum
from verl.algorithms.settings import LossOptions

__all__ = [
    "LOSSES",
    "PER_SEQUENCE",
    "LossFunction",
    "LossInputs",
    "LossOptions",
    "PolicyLoss",
    "cispo",
    "clip_cov",
    "dpo",
    "geo_mean",
    "gpg",
    "gspo",
    "kl_cov",
    "sapo",
    "sppo",
    "vanilla",
]

MAX_LOG_RATIO = 20.0
MAX_SEQUENCE_LOG_RATIO = 10.0


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss sees of a micro-batch: all [T] but `offsets [B+1]`. Only `logprobs` carries a gradient."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    offsets: Tensor
    ref_logprobs: Tensor | None = None
    chosen: Tensor | None = None  # bool: singled out beforehand, with a view of the whole mini-batch

    @property
    def ratio(self) -> Tensor:
        """r = exp(d), d held to +-20."""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean over the generated tokens of each token's own sequence: [T] -> [T]."""
        counts = segment_sum(self.mask.to(values.dtype), self.offsets).clamp(min=1.0)
        return self.sequence_sum(values) / counts[segment_ids(self.offsets)]

    def sequence_sum(self, values: Tensor) -> Tensor:
        """The sum over the generated tokens of each token's own sequence: [T] -> [T]."""
        return segment_sum(torch.where(self.mask, values, 0.0), self.offsets)[segment_ids(self.offsets)]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of each token, and 1 where a clip took the gradient away, all [T]."""

    loss: Tensor
    clipped_high: Tensor | None = None
    clipped_low: Tensor | None = None
    clipped_dual: Tensor | None = None


LossFunction = Callable[[LossInputs, LossOptions], PolicyLoss]


def vanilla(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """max(-A*r, -A*clip(r, 1-low, 1+high)); where A < 0 no more than -A*c (dual clip)."""
    plain = _clipped(x.ratio, x.advantages, o)
    ceiling = -x.advantages * o.clip_c
    dual = (x.advantages < 0) & (plain.loss > ceiling)
    return PolicyLoss(torch.where(dual, ceiling, plain.loss), plain.clipped_high, plain.clipped_low, dual)


def gspo(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """The clip of PPO on the ratio of whole sequences, exp(mean d): exp(sg[mean d] + lp - sg[lp]) at each token."""
    log_ratio = x.sequence_mean(x.logprobs - x.old_logprobs).detach() + x.logprobs - x.logprobs.detach()
    return _clipped(log_ratio.clamp(max=MAX_SEQUENCE_LOG_RATIO).exp(), x.advantages, o)


def cispo(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """-sg[clip(r, 1-low, 1+high)] * A * lp: the clip limits a token's weight, and never takes its gradient away."""
    ratio = x.ratio.detach()
    return PolicyLoss(-ratio.clamp(1.0 - o.clip_low, 1.0 + o.clip_high) * x.advantages * x.logprobs)


def sapo(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """-A * sigmoid(tau * (r - 1)) * 4/tau, tau_pos where A > 0 and tau_neg elsewhere: a soft clip."""
    tau = torch.full_like(x.advantages, o.tau_neg).masked_fill(x.advantages > 0, o.tau_pos)
    return PolicyLoss(-x.advantages * torch.sigmoid(tau * (x.ratio - 1.0)) * 4.0 / tau)


def geo_mean(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """GMPO: -A * exp(mean d) per sequence, d held to [-low, high] on the side that the advantage pushes to."""
    log_ratio, advantage = x.logprobs - x.old_logprobs, x.sequence_mean(x.advantages)
    sign = advantage.sign()
    held = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-o.clip_low, o.clip_high))
    took = (held != log_ratio) & (x.advantages != 0)
    ratio = x.sequence_mean(held).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return PolicyLoss(-advantage * ratio, took & (log_ratio > 0), took & (log_ratio < 0))


def gpg(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """-A * lp."""
    return PolicyLoss(-x.advantages * x.logprobs)


def clip_cov(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """PPO without the gradients of the `chosen` tokens: some of those whose log-prob and advantage rise together."""
    plain = vanilla(x, o)
    return PolicyLoss(
        torch.where(_chosen(x), plain.loss.detach(), plain.loss),
        plain.clipped_high,
        plain.clipped_low,
        plain.clipped_dual,
    )


def kl_cov(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """-A*r, plus coef * |d| on the `chosen` tokens: those whose log-prob and advantage rise together most."""
    distance = (x.logprobs - x.old_logprobs).abs()
    return PolicyLoss(-x.advantages * x.ratio + torch.where(_chosen(x), o.ppo_kl_coef * distance, 0.0))


def dpo(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """-2 * A * sum(lp) per answer: it has the gradient of -log sigmoid(margin) of a pair, the mean over pairs.

    A is what the survey of the mini-batch found: +-beta * sigmoid(-margin) for the better and the worse answer.
    """
    return PolicyLoss(-2.0 * x.advantages * x.sequence_sum(x.logprobs))


def sppo(x: LossInputs, o: LossOptions) -> PolicyLoss:
    """(sum(lp - lp_ref) - eta * A)^2 per sequence, A being how often the answer wins within its group, less 1/2."""
    if x.ref_logprobs is None:
        raise ValueError("sppo: the batch has no ref_logprobs; it is held to a reference")
    return PolicyLoss((x.sequence_sum(x.logprobs - x.ref_logprobs) - o.sppo_eta * x.advantages).square())


LOSSES: dict[str, LossFunction] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "geo_mean": geo_mean,
    "gpg": gpg,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dpo": dpo,
    "sppo": sppo,
}
"""`actor.policy_loss.loss_mode` -> the function that it is."""

PER_SEQUENCE = ("gspo", "geo_mean", "dpo", "sppo")
"""Losses whose formula is a mean over sequences: their aggregation is seq-mean-token-mean."""


def _clipped(ratio: Tensor, advantages: Tensor, o: LossOptions) -> PolicyLoss:
    free = -advantages * ratio
    loss = torch.maximum(free, -advantages * ratio.clamp(1.0 - o.clip_low, 1.0 + o.clip_high))
    took = loss > free
    return PolicyLoss(loss, took & (ratio > 1.0), took & (ratio < 1.0))


def _chosen(x: LossInputs) -> Tensor:
    if x.chosen is None:
        raise ValueError(
            "clip_cov and kl_cov: the batch has no chosen tokens; run the prepass over the mini-batch first"
        )
    return x.chosen
