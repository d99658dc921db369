"""The interface of a training engine: what the rest of verl needs from FSDP2, Megatron-Core or a fake, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from verl.algorithms.aggregate import Totals
from verl.data.batch import FlatBatch

__all__ = ["Loss", "ModelOutput", "TrainEngine"]


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What a forward pass gives, aligned with the tokens of its batch.

    `logprobs [T]`: log-prob of token t given the tokens before it in its own sequence, 0 where the mask is False.
    `entropy [T]`: entropy of the distribution that token t was drawn from, 0 where the mask is False.
    """

    logprobs: Tensor
    entropy: Tensor


Loss = Callable[[ModelOutput, FlatBatch, Totals], tuple[Tensor, dict[str, Tensor]]]
"""(output, micro-batch, totals of the mini-batch over all ranks) -> (loss, metrics).

Both are shares: the loss of one micro-batch already divided by the totals, so that shares of all micro-batches and
ranks add up to the loss of the mini-batch. A metric is a detached scalar of the same kind.
"""


class TrainEngine(Protocol):
    """A model that is trained, spread over `world_size` ranks. Every method is collective: all ranks call it together,
    with the same number of micro-batches; a micro-batch may be empty on some ranks."""

    rank: int
    world_size: int

    def forward(self, micro_batches: Sequence[FlatBatch], *, temperature: float | None = None) -> list[ModelOutput]:
        """Log-probs and entropies without gradients, on the CPU, one output per micro-batch.

        At the temperature of training unless another is given.
        """
        ...

    def update(self, micro_batches: Sequence[FlatBatch], loss: Loss) -> dict[str, float]:
        """One optimiser step on the mini-batch that the micro-batches of all ranks form together."""
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """All-gather of a few numbers per sample: local [n, k] -> [N, k], rank after rank; n may differ by rank."""
        ...

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The full weights under their Hugging Face names, one at a time, the same on every rank; tied ones once.

        In `dtype`, or as they are kept.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold: sharded model and optimiser state, schedule, random states."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        ...
