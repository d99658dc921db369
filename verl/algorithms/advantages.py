"""Advantage estimators: how much better an answer was than what could be expected. Groups are known by id."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["grpo"]

EPS = 1e-6


def grpo(scores: Tensor, groups: Tensor, *, by_std: bool = True) -> Tensor:
    """(s - mean_g) / (std_g + 1e-6) over the samples of one prompt: scores [N], groups [N] of ids -> [N].

    The standard deviation is the unbiased one; `by_std=False` leaves out the division (Dr.GRPO). A group of one has
    nothing to compare with and keeps its score.

    >>> grpo(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, 9]))
    tensor([ 0.7071, -0.7071,  5.0000])
    """
    _, group, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    scores = scores.double()
    alone = counts == 1
    means = torch.where(alone, 0.0, _group_sum(scores, group, len(counts)) / counts)
    centred = scores - means[group]
    if by_std:
        variances = _group_sum(centred.square(), group, len(counts)) / (counts - 1).clamp(min=1)
        deviations = torch.where(alone, 1.0, variances.sqrt() + EPS)
        centred = centred / deviations[group]
    return centred.float()


def _group_sum(values: Tensor, group: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add(0, group, values)
