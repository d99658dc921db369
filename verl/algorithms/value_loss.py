"""What a critic minimises: the squared distance of its values to the returns, held near the values it started from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl.algorithms.aggregate import Totals, aggregate

__all__ = ["ValueObjective", "value_loss"]


class Output(Protocol):
    """Of the model: values [T]."""

    @property
    def values(self) -> Tensor: ...


class Batch(Protocol):
    """Of the data: mask [T], offsets [B+1], old values and returns [T] or None where not known."""

    @property
    def mask(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor: ...
    @property
    def values(self) -> Tensor | None: ...
    @property
    def returns(self) -> Tensor | None: ...


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """0.5 * max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2), and where the clip took the gradient away."""
    free = (values - returns).square()
    held = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(free, held), held > free


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """The value loss, aggregated. `scale` is the length L of `seq-mean-token-sum-norm`."""

    clip: float = 0.5
    agg_mode: str = "token-mean"
    scale: float | None = None

    def __call__(self, output: Output, batch: Batch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        def token_mean(numbers: Tensor) -> Tensor:
            return aggregate(numbers.detach(), batch.mask, batch.offsets, "token-mean", totals)

        tokens, clipped = value_loss(
            output.values, _known(batch.values, "values"), _known(batch.returns, "returns"), self.clip
        )
        loss = aggregate(tokens, batch.mask, batch.offsets, self.agg_mode, totals, scale=self.scale)
        return loss, {
            "critic/vf_loss": loss.detach(),
            "critic/vf_clipfrac": token_mean(clipped),
            "critic/vpred_mean": token_mean(output.values),
        }


def _known(numbers: Tensor | None, name: str) -> Tensor:
    if numbers is None:
        raise ValueError(f"ValueObjective: the batch has no {name}; compute them before the update")
    return numbers
