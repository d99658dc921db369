"""Rollout correction: the mismatch between trainer and rollout engine, always measured and optionally corrected.

D = lp_old - lp_roll, clamped to +-20: the trainer's log-prob of a token minus that of the engine that sampled it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from verl.algorithms.advantages import AdvantageInputs
from verl.algorithms.aggregate import segment_ids
from verl.algorithms.settings import Correction, Rejection

MAX_LOG_RATIO = 20.0
PROBS_DIFF = "training/rollout_probs_diff_mean"
MISMATCH_METRICS = (
    PROBS_DIFF,
    "training/rollout_probs_diff_max",
    "training/rollout_logprobs_diff_max",
    "training/rollout_ess",
    "training/rollout_probs_corr",
)


def correct_mismatch(
    x: AdvantageInputs, old: Tensor, rollout: Tensor, c: Correction
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the fields of the batch that the correction changes, and the metrics of the mismatch."""
    metrics = mismatch_metrics(x.gather(mismatch_moments(x, old, rollout)[None]))
    fields: dict[str, Tensor] = {}
    if c.weigh is not None:
        fields["weights"] = weights = importance_weights(x, old, rollout, c)
        mean, squares = x.token_mean(weights), x.token_mean(weights.square())
        metrics["training/rollout_is_ess"] = mean * mean / squares if squares else 0.0
    if c.reject:
        fields["mask"] = mask = rejection_mask(x, old, rollout, c.reject)
        fields |= count_episode_tokens(replace(x, mask=mask))
        metrics["training/rollout_rejected"] = x.token_mean(~mask)
    return fields, metrics


def count_episode_tokens(x: AdvantageInputs) -> dict[str, Tensor]:
    """Return the field of the batch that must follow its mask, so that an episode of branches still weighs 1."""
    if x.branches is None:
        return {}
    tokens = x.sum_episodes(torch.ones_like(x.rewards)).clamp(min=1.0)
    return {"episode_tokens": _per_token(x, tokens).float()}


def importance_weights(x: AdvantageInputs, old: Tensor, rollout: Tensor, c: Correction) -> Tensor:
    """Return min(exp(D), threshold) per token or min(exp(sum D), threshold) per sequence: [T], detached.

    With a `threshold_lower` the weight is 0 outside [threshold_lower, threshold] instead (IcePop). With `c.normalize`
    they are divided by their mean over the generated tokens, or the sequences, of all ranks.
    """
    gap = log_gap(x, old, rollout)
    if c.weigh == "sequence":
        gap = _per_token(x, x.sum_episodes(gap)).to(gap.dtype)
    weights = gap.exp()
    if c.threshold_lower is None:
        weights = weights.clamp(max=c.threshold)
    else:
        # Not a product: the ratio of a long sequence may be infinite.
        weights = torch.where((weights >= c.threshold_lower) & (weights <= c.threshold), weights, 0.0)
    weights = weights * x.mask
    if c.normalize:
        shares = x.token_weights
        if c.weigh == "sequence":
            shares = shares / _per_token(x, x.sum_episodes(torch.ones_like(gap)).clamp(min=1.0))
        total, count = x.total(weights * shares, shares)
        weights = weights / (total / count) if total else weights
    return weights


def rejection_mask(x: AdvantageInputs, old: Tensor, rollout: Tensor, criteria: Iterable[Rejection]) -> Tensor:
    """Return the mask without the tokens and sequences that any of the criteria rejects: [T].

    Each looks at all generated tokens, including those that another one rejects.
    """
    gap, mask = log_gap(x, old, rollout), x.mask
    for criterion in criteria:
        mask = mask & ~_is_rejected(x, gap, criterion)
    return mask


def log_gap(x: AdvantageInputs, old: Tensor, rollout: Tensor) -> Tensor:
    """Return D of each generated token, 0 elsewhere: [T]."""
    return torch.where(x.mask, (old - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0).detach()


def _is_rejected(x: AdvantageInputs, gap: Tensor, criterion: Rejection) -> Tensor:
    """Return which tokens have a statistic of D outside [lower, upper]: [T] bool.

    - `token`, `sequence`, `geometric`: exp(D), exp(sum D), exp(mean D)
    - `token_k2`, `token_k3`: D^2 / 2, exp(D) - 1 - D
    - `seq_sum_k2`, `seq_mean_k2`, `seq_max_k2` and the same of k3: their sum, mean or maximum over the sequence
    """
    name = criterion.kind
    if name == "token":
        statistic = gap.exp()
    elif name in ("sequence", "geometric"):
        sums = x.sum_episodes(gap) if name == "sequence" else _mean(x, gap)
        statistic = _per_token(x, sums.exp())
    else:
        statistic = gap.square() / 2 if name.endswith("k2") else gap.exp() - 1 - gap
        if name.startswith("seq_mean"):
            statistic = _per_token(x, _mean(x, statistic))
        elif name.startswith("seq_sum"):
            statistic = _per_token(x, x.sum_episodes(statistic))
    is_outside = (statistic < criterion.lower) | (statistic > criterion.upper)
    return _per_token(x, x.sum_episodes(is_outside) > 0) if name.startswith("seq_max") else is_outside


def _mean(x: AdvantageInputs, values: Tensor) -> Tensor:
    """Return the mean over the generated tokens of each sequence's episode: [T] -> [B]."""
    return x.sum_episodes(values) / x.sum_episodes(torch.ones_like(values)).clamp(min=1.0)


def _per_token(x: AdvantageInputs, values: Tensor) -> Tensor:
    """Return the value of each token's sequence: [B] -> [T]."""
    return values[segment_ids(x.offsets)]


def mismatch_moments(x: AdvantageInputs, old_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return one rank's sums and maxima over its generated tokens [11], from which all metrics are computed.

    p and q are the probabilities of the sampled tokens under trainer and engine, D = log p - log q (clamped).
    """
    lp, lq, shares = (each[x.mask].double() for each in (old_logprobs, rollout_logprobs, x.token_weights))
    p, q, weight = lp.exp(), lq.exp(), (lp - lq).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    gap, log_gap = (p - q).abs(), (lp - lq).abs()
    zero = p.new_zeros(1)
    sums = [torch.ones_like(p), gap, p, q, p * p, q * q, p * q, weight, weight * weight]
    maxima = (torch.cat([zero, each]).max() for each in (gap, log_gap))
    return torch.stack([*((each * shares).sum() for each in sums), *maxima])


def mismatch_metrics(moments: Tensor) -> dict[str, float]:
    """Return the metrics of the whole batch from the moments of all ranks [ranks, 11]."""
    n, gap, sp, sq, spp, sqq, spq, sw, sww = moments[:, :9].sum(0).tolist()
    if n == 0:
        return {}
    covariance, var_p, var_q = spq / n - sp * sq / n**2, spp / n - (sp / n) ** 2, sqq / n - (sq / n) ** 2
    spread = (max(var_p, 0.0) * max(var_q, 0.0)) ** 0.5
    ess = sw * sw / (n * sww) if sww else 0.0
    values = [gap / n, float(moments[:, 9].max()), float(moments[:, 10].max()), ess]
    if spread > 1e-12:  # a constant has no correlation
        values.append(covariance / spread)
    return dict(zip(MISMATCH_METRICS, values, strict=False))
