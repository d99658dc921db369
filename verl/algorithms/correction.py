"""Rollout correction: the mismatch between trainer and rollout engine, always measured and optionally corrected.

D = lp_old - lp_roll, clamped to +-20: the trainer's log-prob of a token minus that of the engine that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verl.algorithms.aggregate import segment_ids, segment_sum
from verl.algorithms.settings import Correction

Gather = Callable[[Tensor], Tensor]
MAX_LOG_RATIO = 20.0


def importance_weights(
    old: Tensor, rollout: Tensor, mask: Tensor, offsets: Tensor, c: Correction, gather: Gather
) -> Tensor:
    """Return min(exp(D), threshold) per token or min(exp(sum D), threshold) per sequence: [T], detached.

    With `icepop` the weight is exp(D) of the token, or 0 if that is outside [threshold_lower, threshold]. With
    `c.normalize` they are divided by their mean over the generated tokens, or the sequences, of all ranks.
    """
    if c.weigh == "icepop":
        weights = _statistic(old, rollout, mask, offsets, "token")
        weights = weights * ((weights >= c.threshold_lower) & (weights <= c.threshold)) * mask
    else:
        weights = _statistic(old, rollout, mask, offsets, c.weigh or "token").clamp(max=c.threshold) * mask
    if c.normalize:
        shares = mask.double()
        if c.weigh == "sequence":
            shares = shares / segment_sum(shares, offsets).clamp(min=1.0)[segment_ids(offsets)]
        total, count = gather(torch.stack([(weights * shares).sum(), shares.sum()])[None]).sum(0).tolist()
        weights = weights / (total / count) if total else weights
    return weights


def rejection_mask(old: Tensor, rollout: Tensor, mask: Tensor, offsets: Tensor, c: Correction) -> Tensor:
    """Return the mask without the tokens or sequences whose statistic is outside [lower, upper]: [T].

    The estimates k2 and k3 of the KL are at least 0, and have only an upper bound.
    """
    name = c.reject or "token"
    statistic = _statistic(old, rollout, mask, offsets, name)
    is_low = torch.zeros_like(mask) if is_kl_estimate(name) else statistic < c.lower
    return mask & ~is_low & (statistic <= c.upper)


def is_kl_estimate(reject: str) -> bool:
    """Whether a kind of rejection compares estimates of the KL, not ratios."""
    return reject.endswith(("_k2", "_k3"))


def _statistic(old: Tensor, rollout: Tensor, mask: Tensor, offsets: Tensor, name: str) -> Tensor:
    """Return a statistic of D for each token: [T].

    - `token`, `sequence`, `geometric`: exp(D), exp(sum D), exp(mean D)
    - `token_k2`, `token_k3`: D^2 / 2, exp(D) - 1 - D
    - `seq_mean_k2`, `seq_max_k2`, `seq_mean_k3`, `seq_max_k3`: their mean or maximum over the sequence
    """
    gap = torch.where(mask, (old - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0).detach()
    ids, counts = segment_ids(offsets), segment_sum(mask.to(gap.dtype), offsets).clamp(min=1.0)
    if name == "token":
        return gap.exp()
    if name in ("sequence", "geometric"):
        sums = segment_sum(gap, offsets)
        return (sums / counts if name == "geometric" else sums)[ids].exp()
    estimates = gap.square() / 2 if name.endswith("k2") else gap.exp() - 1 - gap
    if name.startswith("token"):
        return estimates
    if "max" in name:
        return estimates.new_zeros(len(counts)).scatter_reduce(0, ids, estimates, "amax")[ids]
    return (segment_sum(estimates, offsets) / counts)[ids]


def mismatch_moments(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return one rank's sums and maxima over its generated tokens [11], from which all metrics are computed.

    p and q are the probabilities of the sampled tokens under trainer and engine, D = log p - log q (clamped).
    """
    lp, lq = old_logprobs[mask].double(), rollout_logprobs[mask].double()
    p, q, weight = lp.exp(), lq.exp(), (lp - lq).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    gap, log_gap = (p - q).abs(), (lp - lq).abs()
    zero = p.new_zeros(1)
    sums = [torch.ones_like(p), gap, p, q, p * p, q * q, p * q, weight, weight * weight]
    return torch.stack([*(s.sum() for s in sums), torch.cat([zero, gap]).max(), torch.cat([zero, log_gap]).max()])


def mismatch_metrics(moments: Tensor) -> dict[str, float]:
    """Return the metrics of the whole batch from the moments of all ranks [ranks, 11]."""
    n, gap, sp, sq, spp, sqq, spq, sw, sww = moments[:, :9].sum(0).tolist()
    if n == 0:
        return {}
    covariance, var_p, var_q = spq / n - sp * sq / n**2, spp / n - (sp / n) ** 2, sqq / n - (sq / n) ** 2
    spread = (max(var_p, 0.0) * max(var_q, 0.0)) ** 0.5
    metrics = {
        "training/rollout_probs_diff_mean": gap / n,
        "training/rollout_probs_diff_max": float(moments[:, 9].max()),
        "training/rollout_logprobs_diff_max": float(moments[:, 10].max()),
        "training/rollout_ess": sw * sw / (n * sww) if sww else 0.0,
    }
    if spread > 1e-12:  # a constant has no correlation
        metrics["training/rollout_probs_corr"] = covariance / spread
    return metrics
