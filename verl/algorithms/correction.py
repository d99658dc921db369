"""How far the trainer's policy is from the one that generated: always measured, whatever is done about it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["mismatch_metrics", "mismatch_moments"]


def mismatch_moments(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """What one rank contributes [11]: sums and maxima over its generated tokens, enough for every metric below.

    p and q are the probabilities of the sampled tokens under the trainer and the engine, D = log p - log q (clamped).
    """
    lp, lq = old_logprobs[mask].double(), rollout_logprobs[mask].double()
    p, q, weight = lp.exp(), lq.exp(), (lp - lq).clamp(-20, 20).exp()
    gap, log_gap = (p - q).abs(), (lp - lq).abs()
    zero = p.new_zeros(1)
    sums = [torch.ones_like(p), gap, p, q, p * p, q * q, p * q, weight, weight * weight]
    return torch.stack([*(s.sum() for s in sums), torch.cat([zero, gap]).max(), torch.cat([zero, log_gap]).max()])


def mismatch_metrics(moments: Tensor) -> dict[str, float]:
    """Moments of all ranks [ranks, 11] -> the metrics of the whole batch."""
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
    if spread > 1e-12:  # with no spread at all there is nothing to correlate
        metrics["training/rollout_probs_corr"] = covariance / spread
    return metrics
