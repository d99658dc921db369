"""What an engine minimises: losses put together, each term divided by the same totals of the whole mini-batch.

An objective is a frozen record of plain numbers, so that it can be sent to a worker, and a callable
`(output, batch, totals) -> (loss share, metric shares)`. It asks of `output` and `batch` only the attributes below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from verl.algorithms.aggregate import Totals, aggregate
from verl.algorithms.kl import kl_penalty
from verl.algorithms.losses import vanilla

__all__ = ["PolicyObjective", "sft"]


class Output(Protocol):
    """Of the model: both [T]."""

    @property
    def logprobs(self) -> Tensor: ...
    @property
    def entropy(self) -> Tensor: ...


class Batch(Protocol):
    """Of the data: mask [T], offsets [B+1], the others [T] or None where not known."""

    @property
    def mask(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor: ...
    @property
    def old_logprobs(self) -> Tensor | None: ...
    @property
    def ref_logprobs(self) -> Tensor | None: ...
    @property
    def advantages(self) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Clipped policy gradient - entropy_coeff * entropy + kl_coef * KL to the reference.

    `scale` is the length L of `seq-mean-token-sum-norm`; `kl_coef=None` leaves the KL out and needs no reference.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float = 3.0
    agg_mode: str = "token-mean"
    scale: float | None = None
    entropy_coeff: float = 0.0
    kl_coef: float | None = None
    kl_type: str = "low_var_kl"

    def __call__(self, output: Output, batch: Batch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        def share(values: Tensor) -> Tensor:
            return aggregate(values, batch.mask, batch.offsets, self.agg_mode, totals, scale=self.scale)

        def token_mean(values: Tensor) -> Tensor:
            return aggregate(values.detach(), batch.mask, batch.offsets, "token-mean", totals)

        policy = vanilla(
            output.logprobs,
            _known(batch.old_logprobs, "old_logprobs"),
            _known(batch.advantages, "advantages"),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            clip_c=self.clip_c,
        )
        loss = share(policy.loss)
        metrics = {
            "actor/pg_loss": loss.detach(),
            "actor/pg_clipfrac": token_mean(policy.clipped_high + policy.clipped_low),
            "actor/pg_clipfrac_upper": token_mean(policy.clipped_high),
            "actor/pg_clipfrac_lower": token_mean(policy.clipped_low),
            "actor/pg_clipfrac_dual": token_mean(policy.clipped_dual),
            "actor/ppo_kl": token_mean(policy.kl),
            "actor/entropy": token_mean(output.entropy),
        }
        if self.entropy_coeff:
            loss = loss - self.entropy_coeff * share(output.entropy)
        if self.kl_coef is not None:
            kl = share(kl_penalty(output.logprobs, _known(batch.ref_logprobs, "ref_logprobs"), self.kl_type))
            loss = loss + self.kl_coef * kl
            metrics["actor/kl_loss"] = kl.detach()
        return loss, metrics


def sft(output: Output, batch: Batch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the masked tokens, as a mean over tokens: supervised training."""
    loss = aggregate(-output.logprobs, batch.mask, batch.offsets, "token-mean", totals)
    return loss, {"sft/loss": loss.detach()}


def _known(values: Tensor | None, name: str) -> Tensor:
    if values is None:
        raise ValueError(f"PolicyObjective: the batch has no {name}; compute them before the update")
    return values
