"""Sequence parallelism (DeepSpeed Ulysses): the ranks of a group share the tokens of every micro-batch.

Each rank computes a slice of the tokens in all layers. Attention needs whole sequences, but its heads are independent:
ranks exchange their tokens' heads for all tokens of some heads, attend, and exchange the results back. All ranks of a
group have the same micro-batches and compute the same loss, from the log-probs of all slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from verl.errors import EngineError
from verl.training.kernels.collectives import all_to_all, sum_shares
from verl.training.process_group import build_mesh
from verl.training.settings import EngineSettings


def build_sequence_group(settings: EngineSettings, world_size: int, config: PreTrainedConfig) -> SequenceGroup | None:
    """Return the group of this rank, of adjacent ranks; None if every rank has whole sequences. Collective."""
    size = settings.sequence_parallel_size
    if size == 1:
        return None
    if config.num_attention_heads % size:
        raise EngineError(f"{settings.model_path}: {size} ranks cannot share {config.num_attention_heads} heads")
    kind = torch.device(settings.device).type
    mesh = build_mesh(kind, (world_size // size, size), ("data", "sequence"))
    return SequenceGroup(mesh.get_group("sequence"))


class SequenceGroup:
    """Ranks that share tokens: of N tokens, rank i of S has rows i * n to (i + 1) * n, with n = N / S rounded up."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.size, self._rank = group, group.size(), group.rank()

    def part(self, count: int) -> slice:
        """Return which of `count` tokens this rank has."""
        length = -(-count // self.size)
        return slice(min(self._rank * length, count), min((self._rank + 1) * length, count))

    def take(self, rows: Tensor) -> Tensor:
        """Return this rank's part of rows [N, ...] of all tokens; padded with zeros, to be as long as all others."""
        part = self.part(len(rows))
        missing = -(-len(rows) // self.size) - (part.stop - part.start)
        return torch.cat([rows[part], rows.new_zeros(missing, *rows.shape[1:])])

    def collect(self, values: Tensor) -> Tensor:
        """Return the values [N] of all tokens, from those of each rank, which are 0 at the tokens of others."""
        return sum_shares(values, self._group)

    def gather(self, rows: Tensor, count: int) -> Tensor:
        """Return the rows of all `count` tokens from those that each rank took, without gradients."""
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(parts, rows.contiguous(), group=self._group)
        return torch.cat(parts)[:count]

    def attend(
        self, kernel: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *, count: int, **kwargs: Any
    ) -> Tensor:
        """Call an attention kernel on all `count` tokens and a part of the heads: [n, heads, D] -> [n, A, D].

        Heads of keys and values are repeated if there are fewer of them than ranks.
        """
        repeats = math.lcm(key.shape[1], self.size) // key.shape[1]
        key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
        out = kernel(*(self._to_heads(states)[:count] for states in (query, key, value)), **kwargs)
        padding = len(query) * self.size - count
        return self._to_tokens(F.pad(out, (0, 0, 0, 0, 0, padding)))

    def _to_heads(self, states: Tensor) -> Tensor:
        """Exchange all heads of a rank's tokens [n, H, D] for a part of the heads of all tokens [S * n, H / S, D]."""
        parts = states.unflatten(1, (self.size, -1)).transpose(0, 1)
        return all_to_all(parts, self._group).flatten(0, 1)

    def _to_tokens(self, states: Tensor) -> Tensor:
        """Exchange them back: [S * n, H / S, D] -> [n, H, D]."""
        parts = states.unflatten(0, (self.size, -1))
        return all_to_all(parts, self._group).transpose(0, 1).flatten(1, 2)
