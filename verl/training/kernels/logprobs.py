"""Log-probs, entropies, sums of squared probabilities and exact KLs from hidden states, in chunks of positions.

With a vocabulary of 152k the logits of 4,096 tokens take 2.5 GB in float32, and a plain log-softmax with entropy keeps
several copies of them for the backward pass. Here only one chunk of logits exists at a time: the forward pass keeps
one number per position (the log of the normalizer), and the backward pass recomputes each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.training.kernels.compilation import Compiler
from verl.training.settings import default_chunk

DROPPED = -1e15
"""Logit of a token that sampling dropped: its probability is 0, and products with it stay finite, unlike with -inf."""


class LastLayer(NamedTuple):
    """The last layer of a language model at N positions: hidden [N, H], weight [V, H], bias [V].

    The logits [N, V] are `softcap * tanh((hidden @ weight.T + bias) * scale / softcap) / temperature`. In a KL to this
    layer, log-probs below `floor` count as `floor`; with `is_forward` it is the KL from this layer, over the `topk`
    tokens to which it gives the highest probabilities (None: all).

    With `kept [N, K]`, a position has only these tokens, of which some may be repeated: the logits of all others are
    `DROPPED`.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    floor: float | None = None
    is_forward: bool = False
    topk: int | None = None
    kept: Tensor | None = None

    def chunks(self, chunk: int | None) -> Iterator[tuple[slice, LastLayer]]:
        """Split the positions into chunks of `chunk`, or of a default for the device."""
        chunk = chunk or default_chunk(self.hidden.device.type, len(self.weight))
        for start in range(0, len(self.hidden), chunk):
            rows = slice(start, start + chunk)
            yield rows, self._replace(hidden=self.hidden[rows], kept=None if self.kept is None else self.kept[rows])

    def to(self, dtype: torch.dtype) -> LastLayer:
        """Return the same layer that computes its logits in `dtype`; gradients keep the dtype of its tensors."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return self._replace(hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), bias=bias)

    def first_tokens(self, count: int) -> LastLayer:
        """Return the layer over the first `count` tokens of the vocabulary."""
        if count == len(self.weight):
            return self
        return self._replace(weight=self.weight[:count], bias=None if self.bias is None else self.bias[:count])

    def logits(self, temperature: float) -> Tensor:
        """Return the logits [N, V], at least float32, as a new tensor."""
        hidden, weight, bias, scale, softcap = self[:5]
        logits = hidden @ weight.T if bias is None else torch.addmm(bias, hidden, weight.T)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if softcap is not None:
            logits.mul_(scale / softcap).tanh_().mul_(softcap / temperature)
        elif scale != temperature:
            logits.mul_(scale / temperature)
        if self.kept is not None:
            values = logits.gather(-1, self.kept)
            logits.fill_(DROPPED).scatter_(-1, self.kept, values)
        return logits

    def logprobs(self, temperature: float) -> Tensor:
        """Return the log-probs of the whole vocabulary, [N, V]."""
        return self.logits(temperature).log_softmax(-1)


class Kernels(NamedTuple):
    """The forward and backward computation of one chunk, plain or compiled."""

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., Tensor]


def token_logprobs(
    layer: LastLayer,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    kernels: Kernels | None = None,
    with_squares: bool = False,
) -> tuple[Tensor, ...]:
    """Return the log-probs of `targets [N]` and the entropies, both [N] float32, in chunks of `chunk` positions.

    With `with_squares`, also return the sums of squared probabilities over the vocabulary, which have no gradient.
    """
    return _TokenLogprobs.apply(*layer[:3], layer, targets, temperature, chunk, kernels or PLAIN, with_squares)


def vocabulary_kl(layer: LastLayer, other: LastLayer, *, temperature: float = 1.0, chunk: int | None = None) -> Tensor:
    """Return KL(layer || other) at N positions, exact over the vocabulary, [N] float32. `other` gets no gradients.

    Models of one family may pad the same vocabulary to different sizes: the KL is over the tokens that both have.

    With `other.floor` it is the mean under `layer` of max(log p, floor) - max(log q, floor). Its gradient is that of
    the probabilities alone, p * (ratio - mean), which is also the gradient of the KL without a floor: a token below the
    floor in both models has no ratio of its own.

    With `other.is_forward` it is KL(other || layer): the sum of q * (log q - log p) over the `other.topk` tokens of
    the largest q, which are not normalized again. A token whose log p is below the floor has no gradient.
    """
    count = min(len(layer.weight), len(other.weight))
    layer, other = layer.first_tokens(count), other.first_tokens(count)
    return _VocabularyKl.apply(*layer[:3], layer, other, temperature, chunk)


def compiled_kernels(device: torch.device, dtype: torch.dtype) -> tuple[Kernels, str | None]:
    """Compile the kernels on a small example, for all sizes: (kernels, error if they run uncompiled)."""
    compiler = Compiler()
    kernels = Kernels(compiler.compile(_forward), compiler.compile(_backward))
    hidden, weight = (torch.ones(size, 8, dtype=dtype, device=device, requires_grad=True) for size in (6, 32))
    layer = LastLayer(hidden, torch.nn.Parameter(weight))
    logprobs, _ = token_logprobs(layer, torch.arange(6, device=device), chunk=3, kernels=kernels)
    logprobs.sum().backward()
    return kernels, compiler.error


def _forward(layer: LastLayer, targets: Tensor, temperature: float, with_squares: bool = False) -> tuple[Tensor, ...]:
    """Return log-probs of the targets, entropies, and logs of the normalizers of one chunk, each [C].

    The sums of squared probabilities come last, if they are wanted.
    """
    logits = layer.logits(temperature)
    normalizer = logits.logsumexp(-1)
    log_p = logits.sub_(normalizer[:, None])
    logprobs = log_p.gather(-1, targets[:, None]).squeeze(-1)
    p = log_p.exp()
    squares = (torch.linalg.vector_norm(p, dim=-1).square(),) if with_squares else ()
    return logprobs, p.mul_(log_p).sum(-1).neg_(), normalizer, *squares


def _backward(
    layer: LastLayer,
    targets: Tensor,
    temperature: float,
    normalizer: Tensor,
    entropy: Tensor,
    d_logprobs: Tensor | None,
    d_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient [C, V] of hidden @ weight.T for one chunk."""
    logits, softcap = layer.logits(temperature), layer.softcap
    slope = (logits * (temperature / softcap)).square_().neg_().add_(1.0) if softcap is not None else None
    log_p = logits.sub_(normalizer[:, None])
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
    grad.mul_(layer.scale / temperature)
    return grad if slope is None else grad.mul_(slope)


PLAIN = Kernels(_forward, _backward)


class _TokenLogprobs(torch.autograd.Function):
    """`token_logprobs`. hidden, weight and bias are those of `layer`, as inputs that autograd sees."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: LastLayer,
        targets: Tensor,
        temperature: float,
        chunk: int | None,
        kernels: Kernels,
        with_squares: bool,
    ) -> tuple[Tensor, ...]:
        dtype, count = torch.promote_types(hidden.dtype, torch.float32), 4 if with_squares else 3
        outputs = [hidden.new_empty(len(hidden), dtype=dtype) for _ in range(count)]
        logprobs, entropy, normalizer, *squares = outputs
        options = (True,) if with_squares else ()
        for rows, part in layer.chunks(chunk):
            results = kernels.forward(part, targets[rows], temperature, *options)
            for output, values in zip(outputs, results, strict=True):
                output[rows] = values
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.settings = layer.scale, layer.softcap, layer.kept, temperature, chunk, kernels
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*squares)
        return logprobs, entropy, *squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        scale, softcap, kept, temperature, chunk, kernels = ctx.settings
        grads = grads[:2]
        if all(grad is None for grad in grads):
            return (None,) * 9
        layer = LastLayer(hidden, weight, bias, scale, softcap, kept=kept)
        gradients = _Gradients(ctx, layer, normalizer.dtype)
        for rows, part in layer.chunks(chunk):
            upstream = [None if grad is None else grad[rows] for grad in grads]
            saved = targets[rows], temperature, normalizer[rows], entropy[rows]
            gradients.add(rows, kernels.backward(part, *saved, *upstream))
        return *gradients.result(), None, None, None, None, None, None


class _VocabularyKl(torch.autograd.Function):
    """`vocabulary_kl`. hidden, weight and bias are those of `layer`, as inputs that autograd sees."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: LastLayer,
        other: LastLayer,
        temperature: float,
        chunk: int | None,
    ) -> Tensor:
        kl = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for (rows, part), (_, other_part) in zip(layer.chunks(chunk), other.chunks(chunk), strict=True):
            log_p = part.logprobs(temperature)
            if other.is_forward:
                q = _kept_probs(other_part, temperature)
                kl[rows] = -(q * _log_ratio(log_p, other_part, temperature)).sum(-1)
            else:
                kl[rows] = (log_p.exp() * _log_ratio(log_p, other_part, temperature)).sum(-1)
        ctx.save_for_backward(*layer[:3], *other[:3], kl)
        ctx.settings = layer[3:], other[3:], temperature, chunk
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, kl = ctx.saved_tensors
        settings, other_settings, temperature, chunk = ctx.settings
        layer, other = LastLayer(*tensors[:3], *settings), LastLayer(*tensors[3:], *other_settings)
        gradients = _Gradients(ctx, layer, kl.dtype)
        for (rows, part), (_, other_part) in zip(layer.chunks(chunk), other.chunks(chunk), strict=True):
            logits = part.logits(temperature)
            grad = logits.softmax(-1)
            if other.is_forward:  # d kl / d logits = p * sum q - q, without the q of tokens below the floor
                q = _kept_probs(other_part, temperature)
                if other.floor is not None:
                    q = q.where(logits.log_softmax(-1) > other.floor, 0.0)
                grad.mul_(q.sum(-1, keepdim=True)).sub_(q)
            else:  # d kl / d logits = p * (log p - log q - kl)
                grad.mul_(_log_ratio(logits.log_softmax(-1), other_part, temperature).sub_(kl[rows, None]))
            grad.mul_(grads[0][rows, None] * (layer.scale / temperature))
            if layer.softcap is not None:
                grad.mul_(logits.mul_(temperature / layer.softcap).square_().neg_().add_(1.0))
            gradients.add(rows, grad)
        return *gradients.result(), None, None, None, None


def _log_ratio(log_p: Tensor, other: LastLayer, temperature: float) -> Tensor:
    """Return log p - log q of the whole vocabulary [C, V], with the floor of `other`. Overwrites `log_p`."""
    log_q = other.logprobs(temperature)
    if other.floor is not None:
        log_p, log_q = log_p.clamp_(min=other.floor), log_q.clamp_(min=other.floor)
    return log_p.sub_(log_q)


def _kept_probs(layer: LastLayer, temperature: float) -> Tensor:
    """Return the probabilities of the `topk` most likely tokens, 0 for the others: [C, V]."""
    probs = layer.logprobs(temperature).exp_()
    if layer.topk is None or layer.topk >= probs.shape[-1]:
        return probs
    kept = probs.topk(layer.topk, sorted=False)
    return torch.zeros_like(probs).scatter_(-1, kept.indices, kept.values)


class _Gradients:
    """Gradients of hidden states, weight and bias, where needed, accumulated over chunks of logits.

    Accumulated in float32 whatever the dtype of the weights: there are thousands of small terms.
    """

    def __init__(self, ctx: Any, layer: LastLayer, dtype: torch.dtype) -> None:
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        self._layer = layer
        self._hidden = torch.empty_like(layer.hidden) if need_hidden else None
        self._weight = torch.zeros_like(layer.weight, dtype=dtype) if need_weight else None
        self._bias = torch.zeros_like(layer.bias, dtype=dtype) if need_bias and layer.bias is not None else None

    def add(self, rows: slice, grad: Tensor) -> None:
        """Add the gradient [C, V] of hidden @ weight.T at `rows`."""
        if self._bias is not None:
            self._bias += grad.sum(0)
        grad = grad.to(self._layer.hidden.dtype)
        if self._hidden is not None:
            self._hidden[rows] = grad @ self._layer.weight
        if self._weight is not None and self._weight.dtype == grad.dtype:
            self._weight.addmm_(grad.T, self._layer.hidden[rows])
        elif self._weight is not None:
            self._weight += grad.T @ self._layer.hidden[rows]

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self._hidden, self._weight, self._bias
