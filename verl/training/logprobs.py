"""Log-probs, entropies and exact KLs from hidden states, a chunk of positions at a time.

With a vocabulary of 152k the logits of 4,096 tokens are 2.5 GB in float32, and a plain log-softmax with entropy keeps
several copies of them for the backward pass. Here a chunk of logits lives only while it is used: the forward pass keeps
one number per position (the log of the normaliser) and the backward pass computes each chunk again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.training.compiled import Compiled

__all__ = ["PLAIN", "Kernels", "LastLayer", "compiled_kernels", "token_logprobs", "vocabulary_kl"]

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once when the caller does not say how many positions: 64 MiB in float32."""


class LastLayer(NamedTuple):
    """What the logits [N, V] of N positions are made of: hidden [N, H], weight [V, H], bias [V].

    They are `softcap * tanh((hidden @ weight.T + bias) * scale / softcap) / temperature`.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logprobs(self, rows: slice, temperature: float) -> Tensor:
        """Of the whole vocabulary at some of the positions, [C, V]."""
        hidden, weight, bias, scale, softcap = self
        return _logits(hidden[rows], weight, bias, scale, softcap, temperature).log_softmax(-1)


class Kernels(NamedTuple):
    """What is done with one chunk of logits, as it is written (`PLAIN`) or compiled."""

    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    backward: Callable[..., Tensor]


def token_logprobs(
    layer: LastLayer,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    kernels: Kernels | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets [N]` and entropies, both [N] float32. `chunk` positions have their logits at once."""
    chunk = chunk or max(1, CHUNK_ELEMENTS // len(layer.weight))
    hidden, weight, bias, scale, softcap = layer
    form = scale, softcap, temperature
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, form, chunk, kernels or PLAIN)
    return logprobs, entropy


def compiled_kernels(device: torch.device, dtype: torch.dtype) -> tuple[Kernels, str | None]:
    """The kernels, compiled here and now on a small example for all sizes: (kernels, why they run as written)."""
    forward, backward = Compiled(_forward), Compiled(_backward)
    kernels = Kernels(forward, backward)
    hidden, weight = (torch.ones(size, 8, dtype=dtype, device=device, requires_grad=True) for size in (6, 32))
    layer = LastLayer(hidden, torch.nn.Parameter(weight))
    logprobs, _ = token_logprobs(layer, torch.arange(6, device=device), chunk=3, kernels=kernels)
    logprobs.sum().backward()
    return kernels, forward.trouble or backward.trouble


def vocabulary_kl(own: LastLayer, other: LastLayer, *, temperature: float = 1.0, chunk: int | None = None) -> Tensor:
    """KL(own || other) at each of N positions, exact over the vocabulary, [N] float32. Only `own` gets gradients."""
    chunk = chunk or max(1, CHUNK_ELEMENTS // len(own.weight))
    return _VocabularyKl.apply(own.hidden, own.weight, own.bias, own, other, temperature, chunk)


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


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float, softcap: float | None, t: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of C positions: log-probs of their targets, entropies, and the logs of the normalisers, each [C]."""
    logits = _logits(hidden, weight, bias, scale, softcap, t)
    normaliser = logits.logsumexp(-1)
    log_p = logits.sub_(normaliser[:, None])
    logprobs = log_p.gather(-1, targets[:, None]).squeeze(-1)
    return logprobs, log_p.exp().mul_(log_p).sum(-1).neg_(), normaliser


def _backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    temperature: float,
    normaliser: Tensor,
    entropy: Tensor,
    d_logprobs: Tensor | None,
    d_entropy: Tensor | None,
) -> Tensor:
    """The gradient [C, V] of the product of hidden states and weight."""
    logits = _logits(hidden, weight, bias, scale, softcap, temperature)
    slope = (logits * (temperature / softcap)).square_().neg_().add_(1.0) if softcap is not None else None
    log_p = logits.sub_(normaliser[:, None])
    grad = log_p.exp()  # d logprob / d logits = onehot - p;  d entropy / d logits = -p * (log p + entropy)
    if d_entropy is None:
        assert d_logprobs is not None
        grad.mul_(-d_logprobs[:, None])
    else:
        factor = log_p.add_(entropy[:, None]).mul_(-d_entropy[:, None])
        if d_logprobs is not None:
            factor.sub_(d_logprobs[:, None])
        grad.mul_(factor)
    if d_logprobs is not None:
        grad.scatter_add_(-1, targets[:, None], d_logprobs[:, None])
    grad.mul_(scale / temperature)
    return grad if slope is None else grad.mul_(slope)


PLAIN = Kernels(_forward, _backward)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        form: tuple[float, float | None, float],
        chunk: int,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, normaliser = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(3))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            found = kernels.forward(hidden[rows], weight, bias, targets[rows], *form)
            logprobs[rows], entropy[rows], normaliser[rows] = found
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.settings = form, chunk, kernels
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        form, chunk, kernels = ctx.settings
        if all(each is None for each in grads):
            return (None,) * 7
        gradients = _Gradients(ctx, hidden, weight, bias, normaliser.dtype)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            upstream = [None if each is None else each[rows] for each in grads]
            known = normaliser[rows], entropy[rows]
            gradients.add(rows, kernels.backward(hidden[rows], weight, bias, targets[rows], *form, *known, *upstream))
        return *gradients.found(), None, None, None, None


class _VocabularyKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        own: LastLayer,
        other: LastLayer,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        kl = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            log_p = own.logprobs(rows, temperature)
            kl[rows] = (log_p.exp() * log_p.sub_(other.logprobs(rows, temperature))).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, other.hidden, other.weight, other.bias, kl)
        ctx.settings = own.scale, own.softcap, other.scale, other.softcap, temperature, chunk
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, other_hidden, other_weight, other_bias, kl = ctx.saved_tensors
        scale, softcap, other_scale, other_softcap, temperature, chunk = ctx.settings
        other = LastLayer(other_hidden, other_weight, other_bias, other_scale, other_softcap)
        gradients = _Gradients(ctx, hidden, weight, bias, kl.dtype)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], weight, bias, scale, softcap, temperature)
            grad = logits.softmax(-1)  # d kl / d logits = p * (log p - log q - kl)
            factor = logits.log_softmax(-1).sub_(other.logprobs(rows, temperature)).sub_(kl[rows, None])
            grad.mul_(factor).mul_(grads[0][rows, None] * (scale / temperature))
            if softcap is not None:
                grad.mul_(logits.mul_(temperature / softcap).square_().neg_().add_(1.0))
            gradients.add(rows, grad)
        return *gradients.found(), None, None, None, None


class _Gradients:
    """Of hidden states, weight and bias, where they are asked for, summed up from the gradients of chunks of logits.

    The sum over chunks is kept in float32 whatever the weights are: thousands of small terms.
    """

    def __init__(self, ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        self._hidden, self._weight = hidden, weight
        self._d_hidden = torch.empty_like(hidden) if need_hidden else None
        self._d_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        self._d_bias = torch.zeros_like(bias, dtype=dtype) if need_bias and bias is not None else None

    def add(self, rows: slice, grad: Tensor) -> None:
        """The gradient [C, V] of the product of hidden states and weight at `rows`."""
        if self._d_bias is not None:
            self._d_bias += grad.sum(0)
        grad = grad.to(self._hidden.dtype)
        if self._d_hidden is not None:
            self._d_hidden[rows] = grad @ self._weight
        if self._d_weight is not None:
            _accumulate(self._d_weight, grad, self._hidden[rows])

    def found(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self._d_hidden, self._d_weight, self._d_bias


def _accumulate(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """total [V, H] += grad [C, V]^T @ hidden [C, H]."""
    if total.dtype == grad.dtype:
        total.addmm_(grad.T, hidden)
    else:
        total += grad.T @ hidden
