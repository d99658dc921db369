"""Policy losses: one function per formula, from log-probs to a loss per token. `aggregate` makes one number of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PolicyLoss", "vanilla"]

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of each token and what was seen on the way, all [T]; all but `loss` are detached.

    `clipped_high`, `clipped_low` and `clipped_dual` are 1 where that clip took the gradient away; `kl` is lp_old - lp.
    """

    loss: Tensor
    clipped_high: Tensor
    clipped_low: Tensor
    clipped_dual: Tensor
    kl: Tensor


def vanilla(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, clip_c: float
) -> PolicyLoss:
    """max(-A*r, -A*clip(r, 1-clip_low, 1+clip_high)); where A < 0, no more than -A*clip_c. All tensors [T]."""
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    clipped = torch.maximum(free, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    ceiling = -advantages * clip_c
    loss = torch.where(advantages < 0, torch.minimum(clipped, ceiling), clipped)

    took = clipped > free
    dual = (advantages < 0) & (clipped > ceiling)
    return PolicyLoss(
        loss=loss,
        clipped_high=(took & (ratio > 1.0)).to(loss.dtype),
        clipped_low=(took & (ratio < 1.0)).to(loss.dtype),
        clipped_dual=dual.to(loss.dtype),
        kl=-log_ratio.detach(),
    )
