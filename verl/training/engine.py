"""The interface of a training engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from verl.algorithms.aggregate import Totals
from verl.data.flat_batch import FlatBatch

Output = TypeVar("Output")
"""`ModelOutput` for a policy, `ValueOutput` for a critic."""

Loss = Callable[[Output, FlatBatch, Totals], tuple[Tensor, dict[str, Tensor]]]
"""(output, micro-batch, totals of the mini-batch over all ranks) -> (loss, metrics).

Both are shares: already divided by the totals, so that the shares of all micro-batches and ranks add up to the loss of
the mini-batch. A metric is a detached scalar of the same kind.
"""


class TrainEngine(Protocol[Output]):
    """A model distributed over `world_size` ranks.

    Every method is collective: all ranks call it together, with the same number of micro-batches. A micro-batch may be
    empty on some ranks. Ranks that share the tokens of a batch have the same `data_rank`, and the same micro-batches.
    """

    rank: int
    data_rank: int
    world_size: int

    def forward(
        self,
        micro_batches: Sequence[FlatBatch],
        *,
        temperature: float | None = None,
        reference: TrainEngine[Output] | None = None,
        with_squares: bool = False,
    ) -> list[Output]:
        """Return the output for each micro-batch, without gradients, on the CPU.

        `temperature` defaults to that of training; values have none. With a `reference` of the same kind and
        vocabulary, the output includes the KL to it; `with_squares`, that of a policy includes `sum_pi_squared`.
        """
        ...

    def update(
        self,
        micro_batches: Sequence[FlatBatch],
        loss: Loss[Output],
        *,
        reference: TrainEngine[Output] | None = None,
        teacher: TrainEngine[Output] | None = None,
    ) -> dict[str, float]:
        """Run one optimizer step on the mini-batch formed by the micro-batches of all ranks.

        With a `reference` or a `teacher`, the output passed to the loss includes the KL to it, with gradients. Returns
        the metrics of the loss, summed over micro-batches and ranks, and `grad_norm`, `lr` and `skipped_steps`,
        prefixed by the engine's role: `actor/grad_norm`, `critic/grad_norm`.
        """
        ...

    def advance_schedule(self) -> None:
        """Move the learning rate to that of the next training step; a step may have several updates."""
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """All-gather a few numbers per sample: local [n, k] -> [N, k], in the order of ranks; n may differ by rank."""
        ...

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the full weights with their Hugging Face names, the same on every rank; tied weights once.

        In `dtype`, or in the dtype in which they are stored.
        """
        ...

    def copy_weights_from(self, other: TrainEngine[Output], ratio: float = 1.0) -> None:
        """Move the weights toward those of another engine with the same model and sharding; by default all the way."""
        ...

    def find_divergence(self) -> str:
        """Return what is not finite: weights, or the gradient of a probe; empty if training can continue from them."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: sharded model and optimizer state, schedule, random states."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a `state`. Parts that it lacks are left unchanged."""
        ...


CONTENTS = {"model": ("model", "base"), "optimizer": ("optimizer",), "extra": ("schedule", "rng", "policy")}
"""Setting -> parts of an engine's state."""


def select_contents(
    states: Mapping[str, dict[str, Any]], contents: Mapping[str, Collection[str]] | None
) -> dict[str, dict[str, Any]]:
    """Return the wanted parts of each folder's state, all of them by default; folders without any are left out.

    >>> select_contents({"actor": {"model": 1, "rng": 2}, "critic": {"model": 3}}, {"actor": ["extra"], "critic": []})
    {'actor': {'rng': 2}}
    """
    selected = {}
    for folder, state in states.items():
        wanted = {part for content in (contents or {}).get(folder, CONTENTS) for part in CONTENTS.get(content, ())}
        selected[folder] = {part: value for part, value in state.items() if part in wanted}
    return {folder: state for folder, state in selected.items() if state}
