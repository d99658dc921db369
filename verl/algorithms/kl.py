"""Estimates of the KL divergence from a reference, per token, out of the log-probs of the tokens that were drawn.

The exact one needs both models at once and comes from the engine: see `verl.training.logprobs.vocabulary_kl`.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["EXACT", "KINDS", "kl_penalty"]

EXACT = "full"
"""The name of the KL that is no estimate: the sum over the whole vocabulary."""

KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""Every accepted name of an estimator, and which one it means."""


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """KL per token, [T]; x = lp_ref - lp.

    `k1` -x; `abs` |x|; `k2` x^2/2; `k3` exp(x)-x-1 with x held to +-20 and the value to +-10. A `+` after the name
    takes that value forward and the gradient of `k2` backward: the one whose mean is the gradient of the true KL.
    """
    name = kind.removesuffix("+")
    if name not in KINDS:
        raise ValueError(f"kl_loss_type: {kind!r} is not one of {', '.join(KINDS)}, each with or without '+'")
    value = _estimate(logprobs, ref_logprobs, KINDS[name])
    if not kind.endswith("+"):
        return value
    slope = _estimate(logprobs, ref_logprobs, "k2")
    return value.detach() + slope - slope.detach()


def _estimate(logprobs: Tensor, ref_logprobs: Tensor, name: str) -> Tensor:
    x = ref_logprobs - logprobs
    if name == "k1":
        return -x
    if name == "abs":
        return x.abs()
    if name == "k2":
        return 0.5 * x.square()
    x = x.clamp(-20.0, 20.0)
    return (x.exp() - x - 1.0).clamp(-10.0, 10.0)
