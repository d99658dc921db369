"""Log-probs and entropies over a vocabulary that is split over tensor parallel ranks, in chunks of positions.

No rank has the logits of the whole vocabulary, and of its own part only those of one chunk exist at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl.training.kernels.logprobs import DROPPED
from verl.training.settings import default_chunk


class VocabularySlice(NamedTuple):
    """The tokens of which this rank has the output weights: from `start`, of `vocabulary` in all."""

    start: int
    vocabulary: int
    group: dist.ProcessGroup


def sharded_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    part: VocabularySlice,
    *,
    temperature: float,
    chunk: int | None,
    with_squares: bool = False,
) -> tuple[Tensor, ...]:
    """Return the log-probs of `targets [N]` and the entropies, both [N] float32; with `with_squares` sums of p^2, too.

    Args:
        hidden: States [N, H], the same on all ranks of the group. Their gradient is the share of this rank's tokens.
        weight: Output weights [V / ranks, H] of this rank.
        targets: Token ids [N].
        part: The vocabulary slice of this rank.
        temperature: Divides the logits.
        chunk: Positions whose logits exist at a time; None: a default for the device.
        with_squares: The sums have no gradient.
    """
    outputs: tuple[Tensor, ...] = _ShardedLogprobs.apply(hidden, weight, targets, part, temperature, chunk)
    return outputs if with_squares else outputs[:2]


class _ShardedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        part: VocabularySlice,
        temperature: float,
        chunk: int | None,
    ) -> tuple[Tensor, ...]:
        chunk = chunk or default_chunk(hidden.device.type, part.vocabulary)
        results = torch.empty(4, len(hidden), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], weight, part, temperature)
            largest = logits.amax(-1)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=part.group)
            logits -= largest[:, None]
            own, found = _find(targets[rows], weight, part)
            at_target = logits.gather(-1, own[:, None]).squeeze(-1) * found
            exps = logits.exp()
            sums = torch.stack([exps.sum(-1), (exps * logits).sum(-1), at_target, exps.square().sum(-1)])
            dist.all_reduce(sums, group=part.group)
            total, weighted, at_target, squares = sums
            log_total = total.log()
            results[:, rows] = torch.stack(
                [at_target - log_total, log_total - weighted / total, largest + log_total, squares / total.square()]
            )
        logprobs, entropies, normalizers, squares = results
        ctx.save_for_backward(hidden, weight, targets, entropies, normalizers)
        ctx.settings = part, temperature, chunk
        ctx.mark_non_differentiable(squares)
        return logprobs, entropies, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropies, normalizers = ctx.saved_tensors
        part, temperature, chunk = ctx.settings
        d_logprobs, d_entropies = grads[:2]
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            log_p = _logits(hidden[rows], weight, part, temperature) - normalizers[rows, None]
            own, found = _find(targets[rows], weight, part)
            # d logprob / d logits = onehot - p;  d entropy / d logits = -p * (log p + entropy)
            factor = d_logprobs[rows, None] + d_entropies[rows, None] * (log_p + entropies[rows, None])
            grad = log_p.exp().mul_(factor).neg_()
            grad.scatter_add_(-1, own[:, None], (d_logprobs[rows] * found)[:, None])
            grad = grad.div_(temperature).to(weight.dtype)
            d_hidden[rows] = grad @ weight
            d_weight += grad.T @ hidden[rows]
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, part: VocabularySlice, temperature: float) -> Tensor:
    """Return the logits [C, V / ranks] float32; the vocabulary's padding has probability 0."""
    logits = (hidden @ weight.T).to(torch.float32)
    if temperature != 1.0:
        logits /= temperature
    logits[:, max(0, part.vocabulary - part.start) :] = DROPPED
    return logits


def _find(targets: Tensor, weight: Tensor, part: VocabularySlice) -> tuple[Tensor, Tensor]:
    """Return the index of each target in this rank's part, and whether it is there."""
    own = targets - part.start
    found = (own >= 0) & (own < len(weight))
    return own.clamp(0, len(weight) - 1), found
