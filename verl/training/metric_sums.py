"""Sums of metrics over all ranks, as one tensor per step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class MetricSums:
    """Sums metrics over ranks. All ranks call `reduce` together, each with the names that it has values for.

    A rank without samples does not know the names. So they are exchanged as objects, but only in a step in which some
    rank has a new one; otherwise one all-gather of numbers is enough. They are added in the order of ranks, which an
    all-reduce does not promise: a resumed run has the same digits.
    """

    def __init__(self) -> None:
        self._names: list[str] = []  # the same on every rank

    def reduce(self, shares: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the sum of each metric; a rank that lacks one adds 0."""
        rows = self._gather(shares)
        if bool(rows[:, 0].any()):
            self._add_names(shares)
            rows = self._gather(shares)
        size = len(self._names)
        total = torch.zeros(size, dtype=torch.float64)
        for row in rows:
            total += row[1 + size :]
        is_present = rows[:, 1 : 1 + size].any(dim=0).tolist()
        sums = zip(self._names, total.tolist(), is_present, strict=True)
        return {name: value for name, value, has_value in sums if has_value}

    def _gather(self, shares: Mapping[str, Tensor]) -> Tensor:
        """Return [ranks, 1 + 2 names]: whether a name is new, which names have a value, and the values."""
        has_new = any(name not in self._names for name in shares)
        values = [float(shares[name]) if name in shares else 0.0 for name in self._names]
        row = torch.tensor([has_new, *(name in shares for name in self._names), *values], dtype=torch.float64)
        rows = row.new_empty(dist.get_world_size(), len(row))
        dist.all_gather(list(rows), row)
        return rows

    def _add_names(self, shares: Mapping[str, Tensor]) -> None:
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, list(shares))
        self._names = list(dict.fromkeys([*self._names, *(name for names in gathered for name in names)]))
