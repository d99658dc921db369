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

    With `c.normalize` they are divided by their mean over the generated tokens, or the sequences, of all ranks.
    """
    weights = _ratio(old, rollout, mask, offsets, c.weigh or "token").clamp(max=c.threshold) * mask
    if c.normalize:
        shares = mask.double()
        if c.weigh == "sequence":
            shares = shares / segment_sum(shares, offsets).clamp(min=1.0)[segment_ids(offsets)]
        total, count = gather(torch.stack([(weights * shares).sum(), shares.sum()])[None]).sum(0).tolist()
        weights = weights / (total / count) if total else weights
    return weights


def rejection_mask(old: Tensor, rollout: Tensor, mask: Tensor, offsets: Tensor, c: Correction) -> Tensor:
    """Return the mask without the tokens or sequences whose ratio is outside [lower, upper]: [T]."""
    ratio = _ratio(old, rollout, mask, offsets, c.reject or "token")
    return mask & (ratio >= c.lower) & (ratio <= c.upper)


def _ratio(old: Tensor, rollout: Tensor, mask: Tensor, offsets: Tensor, level: str) -> Tensor:
    """Return exp(D) of each token, or of its sequence with D summed ("sequence") or averaged ("geometric"): [T]."""
    gap = torch.where(mask, (old - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0).detach()
    if level != "token":
        sums = segment_sum(gap, offsets)
        if level == "geometric":
            sums = sums / segment_sum(mask.to(gap.dtype), offsets).clamp(min=1.0)
        gap = sums[segment_ids(offsets)]
    return gap.exp()


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
