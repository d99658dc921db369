"""Aggregation of per-token values. The only module that normalizes a loss, always by totals of the whole mini-batch.

A mean over a micro-batch is not a share of the mean over the mini-batch: gradients would depend on how the mini-batch
is split. Every result here is a share, and the shares of all micro-batches and ranks add up to the mini-batch's value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True, slots=True)
class Totals:
    """Generated tokens, and sequences that have any, in the whole mini-batch over all ranks.

    All branches of an episode are one sequence together, and a turn that is in several of them counts once.
    """

    tokens: float
    sequences: float


def segment_ids(offsets: Tensor) -> Tensor:
    """Return the sequence index of each token: offsets [B+1] -> [T]."""
    lengths = offsets.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum over each sequence: values [T], offsets [B+1] -> [B]."""
    return values.new_zeros(len(offsets) - 1).index_add(0, segment_ids(offsets), values)


@dataclass(frozen=True, slots=True)
class BranchWeights:
    """How the branches of episodes are weighed: both [T], float32.

    `shares`: 1 / the number of branches that contain the token. `tokens`: generated tokens of the whole episode.
    """

    shares: Tensor
    tokens: Tensor


def count_totals(mask: Tensor, offsets: Tensor, branches: BranchWeights | None = None) -> Totals:
    """Return what one micro-batch adds to the totals of its mini-batch: mask [T], offsets [B+1]."""
    if branches is None:
        per_sequence = segment_sum(mask.long(), offsets)
        return Totals(tokens=float(per_sequence.sum()), sequences=float((per_sequence > 0).sum()))
    shares = branches.shares.double() * mask
    return Totals(tokens=float(shares.sum()), sequences=float((shares / branches.tokens).sum()))


def aggregate(
    values: Tensor,
    mask: Tensor,
    offsets: Tensor,
    mode: str,
    totals: Totals,
    *,
    scale: float | None = None,
    branches: BranchWeights | None = None,
) -> Tensor:
    """Return the share of these tokens in the aggregate of their mini-batch: values, mask [T], offsets [B+1].

    With `branches` a sequence is an episode, however many branches it has.

    - `token-mean`: sum / tokens
    - `seq-mean-token-sum`: sum / sequences
    - `seq-mean-token-mean`: sum over sequences of (sum / tokens of that sequence), / sequences
    - `seq-mean-token-sum-norm`: sum / (sequences * scale)
    """
    values = torch.where(mask, values if branches is None else values * branches.shares, 0.0)
    tokens, sequences = max(totals.tokens, 1.0), max(totals.sequences, 1.0)
    if mode == "token-mean":
        return values.sum() / tokens
    if mode == "seq-mean-token-sum":
        return values.sum() / sequences
    if mode == "seq-mean-token-mean" and branches is not None:
        return (values / branches.tokens).sum() / sequences
    if mode == "seq-mean-token-mean":
        counts = segment_sum(mask.to(values.dtype), offsets).clamp(min=1.0)
        return (segment_sum(values, offsets) / counts).sum() / sequences
    if mode == "seq-mean-token-sum-norm":
        if scale is None or scale <= 0:
            raise ValueError(
                f"loss_agg_mode=seq-mean-token-sum-norm: scale {scale!r} must be a positive length; "
                "set loss_scale_factor or max_response_length"
            )
        return values.sum() / (sequences * scale)
    raise ValueError(f"loss_agg_mode: {mode!r} is not one of {', '.join(MODES)}")
