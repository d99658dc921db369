"""The interface of a training engine: what the rest of verl needs from FSDP2, Megatron-Core or a fake, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from verl.algorithms.aggregate import Totals
from verl.data.flat_batch import FlatBatch

__all__ = ["Loss", "ModelOutput", "TrainEngine", "ValueOutput"]


class ModelOutput(NamedTuple):
    """What a forward pass of a policy gives, aligned with the tokens of its batch.

    `logprobs [T]`: log-prob of token t given the tokens before it in its own sequence, 0 where the mask is False.
    `entropy [T]`: entropy of the distribution that token t was drawn from, 0 where the mask is False.
    `kl [T]`: KL from that distribution to the reference's, exact over the vocabulary; None without a reference.
    """

    logprobs: Tensor
    entropy: Tensor
    kl: Tensor | None = None


class ValueOutput(NamedTuple):
    """What a forward pass of a critic gives, aligned with the tokens of its batch.

    `values [T]`: value of the state from which token t was drawn, that is of the tokens before it in its own sequence;
    0 where the mask is False.
    """

    values: Tensor


Output = TypeVar("Output")
"""`ModelOutput` of a policy, `ValueOutput` of a critic."""

Loss = Callable[[Output, FlatBatch, Totals], tuple[Tensor, dict[str, Tensor]]]
"""(output, micro-batch, totals of the mini-batch over all ranks) -> (loss, metrics).

Both are shares: the loss of one micro-batch already divided by the totals, so that shares of all micro-batches and
ranks add up to the loss of the mini-batch. A metric is a detached scalar of the same kind.
"""


class TrainEngine(Protocol[Output]):
    """A model that is trained, spread over `world_size` ranks. Every method is collective: all ranks call it together,
    with the same number of micro-batches; a micro-batch may be empty on some ranks."""

    rank: int
    world_size: int

    def forward(
        self,
        micro_batches: Sequence[FlatBatch],
        *,
        temperature: float | None = None,
        reference: TrainEngine[Output] | None = None,
    ) -> list[Output]:
        """What the model says of each micro-batch, without gradients, on the CPU.

        At the temperature of training unless another is given; values have none. With a reference of the same kind and
        vocabulary, log-probs come with the KL to it.
        """
        ...

    def update(
        self, micro_batches: Sequence[FlatBatch], loss: Loss[Output], *, reference: TrainEngine[Output] | None = None
    ) -> dict[str, float]:
        """One optimiser step on the mini-batch that the micro-batches of all ranks form together.

        With a `reference` the loss sees the KL to it, which has a gradient.
        Returns the metrics of the loss, summed over micro-batches and ranks, and the engine's own `grad_norm`, `lr` and
        `skipped_steps` behind its role: `actor/grad_norm`, `critic/grad_norm`.
        """
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """All-gather of a few numbers per sample: local [n, k] -> [N, k], rank after rank; n may differ by rank."""
        ...

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The full weights under their Hugging Face names, one at a time, the same on every rank; tied ones once.

        In `dtype`, or as they are kept.
        """
        ...

    def copy_weights_from(self, other: TrainEngine[Output]) -> None:
        """Become what another model of the same kind and sharding is now."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold: sharded model and optimiser state, schedule, random states."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; parts that are not in it stay as they are."""
        ...
