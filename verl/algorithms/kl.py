"""Per-token estimates of the KL divergence to a reference, from the log-probs of the sampled tokens.

The exact KL needs both models at once and is computed by the engine: `verl.training.logprobs.vocabulary_kl`.
"""

from __future__ import annotations

from torch import Tensor

EXACT = "full"
"""The name of the exact KL, summed over the whole vocabulary."""

KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""Accepted name -> estimator."""


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Return the KL estimate of each token [T], with x = lp_ref - lp.

    `k1`: -x; `abs`: |x|; `k2`: x^2/2; `k3`: exp(x)-x-1 with x clamped to +-20 and the value to +-10. A trailing `+`
    keeps that value but takes the gradient of `k2`, whose expectation is the gradient of the true KL.
    """
    name = kind.removesuffix("+")
    if name not in KINDS:
        raise ValueError(f"kl_loss_type: {kind!r} is not one of {', '.join(KINDS)}, each with or without '+'")
    value = _estimate(logprobs, ref_logprobs, KINDS[name])
    if not kind.endswith("+"):
        return value
    k2 = _estimate(logprobs, ref_logprobs, "k2")
    return value.detach() + k2 - k2.detach()


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
