"""Collectives that gradients pass through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_to_all(
    rows: Tensor, group: dist.ProcessGroup, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
) -> Tensor:
    """Send rows [n, ...] to the ranks of a group, in their order; return the rows received from each, in their order.

    `sends` and `receives` are the number of rows for and from each rank; by default all the same.
    """
    return _AllToAll.apply(rows, group, sends, receives)


def sum_shares(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the values of all ranks, from which all of them compute the same loss.

    So the gradient of a rank's values is that of the sum; it is not summed over ranks.
    """
    total = values.detach().clone()
    dist.all_reduce(total, group=group)
    return total + (values - values.detach())


class _AllToAll(torch.autograd.Function):
    """Gradients take the same way back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        group: dist.ProcessGroup,
        sends: Sequence[int] | None,
        receives: Sequence[int] | None,
    ) -> Tensor:
        ctx.way_back = group, receives, sends
        count = len(rows) if receives is None else sum(receives)
        received = rows.new_empty(count, *rows.shape[1:])
        splits = None if receives is None else list(receives), None if sends is None else list(sends)
        dist.all_to_all_single(received, rows.contiguous(), *splits, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grads[0], *ctx.way_back), None, None, None
