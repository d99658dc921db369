"""Log-probs and entropies from hidden states, a chunk of positions at a time.

With a vocabulary of 152k the logits of 4,096 tokens are 2.5 GB in float32, and a plain log-softmax with entropy keeps
several copies of them for the backward pass. Here a chunk of logits lives only while it is used: the forward pass keeps
one number per position (the log of the normaliser) and the backward pass computes each chunk again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["token_logprobs"]

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once when the caller does not say how many positions: 64 MiB in float32."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets [N]` and entropies, both [N] float32, from hidden [N, H], weight [V, H] and bias [V].

    The logits are `softcap * tanh((hidden @ weight.T + bias) * scale / softcap) / temperature`. `chunk` is the number
    of positions whose logits exist at once.
    """
    chunk = chunk or max(1, CHUNK_ELEMENTS // weight.shape[0])
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, scale, softcap, temperature, chunk)
    return logprobs, entropy


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None, temperature: float
) -> Tensor:
    """One chunk of logits [C, V], at least float32, in memory of its own."""
    logits = hidden @ weight.T if bias is None else torch.addmm(bias, hidden, weight.T)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits.mul_(scale / softcap).tanh_().mul_(softcap / temperature)
    elif scale != temperature:
        logits.mul_(scale / temperature)
    return logits


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, normaliser = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(3))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], weight, bias, scale, softcap, temperature)
            normaliser[rows] = logits.logsumexp(-1)
            log_p = logits.sub_(normaliser[rows, None])
            logprobs[rows] = log_p.gather(-1, targets[rows, None]).squeeze(-1)
            entropy[rows] = log_p.exp().mul_(log_p).sum(-1).neg_()
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.settings = (scale, softcap, temperature, chunk)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_logprobs, d_entropy = grads
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        scale, softcap, temperature, chunk = ctx.settings
        if d_logprobs is None and d_entropy is None:
            return (None,) * 8
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        # The sum over chunks is kept in float32 whatever the weights are: thousands of small terms.
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if need_weight else None
        d_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if need_bias and bias is not None else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], weight, bias, scale, softcap, temperature)
            slope = (logits * (temperature / softcap)).square_().neg_().add_(1.0) if softcap is not None else None
            log_p = logits.sub_(normaliser[rows, None])
            grad = log_p.exp()  # d logprob / d logits = onehot - p;  d entropy / d logits = -p * (log p + entropy)
            if d_entropy is None:
                assert d_logprobs is not None
                grad.mul_(-d_logprobs[rows, None])
            else:
                factor = log_p.add_(entropy[rows, None]).mul_(-d_entropy[rows, None])
                if d_logprobs is not None:
                    factor.sub_(d_logprobs[rows, None])
                grad.mul_(factor)
            del logits, log_p
            if d_logprobs is not None:
                grad.scatter_add_(-1, targets[rows, None], d_logprobs[rows, None])
            grad.mul_(scale / temperature)
            if slope is not None:
                grad.mul_(slope)
            if d_bias is not None:
                d_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[rows] = grad @ weight
            if d_weight is not None:
                _accumulate(d_weight, grad, hidden[rows])
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _accumulate(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """total [V, H] += grad [C, V]^T @ hidden [C, H]."""
    if total.dtype == grad.dtype:
        total.addmm_(grad.T, hidden)
    else:
        total += grad.T @ hidden
