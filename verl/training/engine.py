"""The interface of a training engine.

An engine is registered by name in `verl.config.train_engines`, and built by `verl.training.registry`.
tests/contract/test_train_engine.py is the suite that an engine must pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algorithms.aggregate import Totals, count_totals
from verl.algorithms.objective import weigh_branches
from verl.data.flat_batch import FlatBatch
from verl.errors import EngineError
from verl.training.kernels.logprobs import LastLayer
from verl.training.layout import RankLayout
from verl.training.settings import EngineSettings, Schedule
from verl.types import LocalShard

Output = TypeVar("Output")
"""`ModelOutput` for a policy, `ValueOutput` for a critic."""
Loss = Callable[[Output, FlatBatch, Totals], tuple[Tensor, dict[str, Tensor]]]
"""(output, micro-batch, totals of the mini-batch over all ranks) -> (loss, metrics).

Both are shares: already divided by the totals, so that the shares of all micro-batches and ranks add up to the loss of
the mini-batch. A metric is a detached scalar of the same kind.
"""


class KLTarget(Protocol):
    """A model to which an engine computes the KL over the whole vocabulary (capability `exact_kl`)."""

    def last_layer(self, batch: FlatBatch) -> LastLayer:
        """Return the last layer at the generated tokens of a micro-batch, without gradients."""
        ...

    def release(self) -> None:
        """Free what `last_layer` has gathered; called after the last micro-batch."""
        ...


class ReferenceEngine(KLTarget, Protocol[Output]):
    """A model that is only compared with: a reference or a teacher. Every method is collective."""

    @abstractmethod
    def forward(
        self,
        micro_batches: Sequence[FlatBatch],
        *,
        temperature: float | None = None,
        reference: KLTarget | None = None,
        with_squares: bool = False,
    ) -> list[Output]:
        """Return the output for each micro-batch, without gradients, on the CPU.

        Args:
            micro_batches: The micro-batches of this data rank.
            temperature: By default that of training; values have none.
            reference: A model with the same vocabulary, to which the output includes the KL.
            with_squares: Include `sum_pi_squared` (capability `squared_probs`).
        """
        ...


class TrainEngine(ReferenceEngine[Output]):
    """A model distributed over the ranks of the default process group.

    Every method is collective: all ranks call it together, with the same number of micro-batches. A micro-batch may be
    empty on some ranks. Ranks of the same data rank get the same micro-batches, and return the same results.

    Methods that are not abstract belong to capabilities, or have an implementation that suits most engines.

    Attributes:
        settings: The settings that it was built from.
        rank: The rank of this process.
        layout: The data rank of every rank.
        schedule: The learning rate by step; may be replaced between updates.
        notes: Messages for the user, known once the model is built.
    """

    settings: EngineSettings
    rank: int
    layout: RankLayout
    schedule: Schedule
    notes: Sequence[str] = ()

    @property
    def data_rank(self) -> int:
        return self.layout.data_ranks[self.rank]

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    # --- computing

    @abstractmethod
    def update(
        self,
        micro_batches: Sequence[FlatBatch],
        loss: Loss[Output],
        *,
        reference: KLTarget | None = None,
        teacher: KLTarget | None = None,
    ) -> dict[str, float]:
        """Run one optimizer step on the mini-batch formed by the micro-batches of all ranks.

        With a `reference` or a `teacher`, the output passed to the loss includes the KL to it, with gradients. The step
        is skipped if no token is trained, or if the gradient is not finite.

        Returns:
            The metrics of the loss, summed over micro-batches and ranks, and `grad_norm`, `lr` and `skipped_steps`,
            prefixed by the engine's role: `actor/grad_norm`, `critic/grad_norm`.

        Raises:
            DivergenceError: More than `settings.max_skipped_steps` updates in a row had a gradient that is not finite.
        """

    @abstractmethod
    def advance_schedule(self) -> None:
        """Move the learning rate to that of the next training step; a step may have several updates."""

    def count_totals(self, micro_batches: Sequence[FlatBatch]) -> Totals:
        """Return the tokens and sequences of the mini-batch over all ranks, which divide its loss. Collective."""
        parts = [count_totals(batch.mask, batch.offsets, weigh_branches(batch)) for batch in micro_batches]
        counts = torch.tensor([sum(t.tokens for t in parts), sum(t.sequences for t in parts)], dtype=torch.float64)
        dist.all_reduce(counts)
        counts /= self.layout.group_size  # ranks that have the same batches
        return Totals(tokens=float(counts[0]), sequences=float(counts[1]))

    def gather(self, rows: Tensor) -> Tensor:
        """All-gather a few numbers per sample: local [n, k] -> [N, k], in the order of data ranks; n may differ."""
        parts = [rows] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(parts, rows.cpu().clone())  # a view would be sent with its whole storage
        return torch.cat(self.layout.collect(parts)).cpu()

    def last_layer(self, batch: FlatBatch) -> LastLayer:
        raise self._refuse("exact_kl")

    def release(self) -> None:
        return None

    def without_adapter(self) -> ReferenceEngine[Output]:
        """Return this model with its adapter disabled, as a reference (capability `adapters`)."""
        raise self._refuse("adapters")

    def rounding_noise(self, dtype: str) -> AbstractContextManager[None] | None:
        """Return a context in which results differ from the others as if by rounding to `dtype` in every layer.

        None, the default, if the engine cannot simulate it; the probe of a weight sync then has a fixed tolerance.
        """
        return None

    # --- weights

    @abstractmethod
    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the full weights with their Hugging Face names, the same on every rank; tied weights once.

        An adapter is merged into them. They are in `dtype`, or in the dtype in which they are stored. Each tensor may
        be overwritten once the next one is requested.
        """

    @abstractmethod
    def weight_shapes(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield what `weights` yields, on the meta device and without communication."""

    def local_shards(self, dtype: torch.dtype) -> Iterator[tuple[str, LocalShard]] | None:
        """Return what `weights` yields, as the shard that this rank has of each, so that all ranks send their own.

        All ranks yield the same names in the same order. None, the default, if some weight is not stored in shards of
        its Hugging Face form; then one rank sends what all ranks gather.
        """
        return None

    def adapter_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield only the tensors of the adapter, with their PEFT names (capability `adapters`)."""
        raise self._refuse("adapters")

    @abstractmethod
    def copy_weights_from(self, other: TrainEngine[Output], ratio: float = 1.0) -> None:
        """Move the weights toward those of another engine with the same model and sharding; by default all the way."""

    # --- checkpoints

    @abstractmethod
    def find_divergence(self) -> str:
        """Return what is not finite: weights, or the gradient of a probe; empty if training can continue from them."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, in nested dictionaries.

        Leaves are tensors, of which all ranks have the same, `LocalShard`s or DTensors of tensors that are distributed
        over ranks, and plain values. Parts are `model`, by the names of the transformers model's parameters;
        `optimizer`; `schedule`; `rng`, whose keys are ranks; and `base`, if `model` holds only an adapter.
        """

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a `state`. Parts that it lacks are left unchanged."""

    def _refuse(self, capability: str) -> EngineError:
        return EngineError(f"{type(self).__name__} does not support {capability}; its spec must not declare it")


def sum_metrics(shares: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the sum of each metric over all ranks; a rank without samples has none. Collective.

    Added in the order of ranks, which an all-reduce does not promise, so that a resumed run has the same digits.
    """
    parts: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, {name: float(value) for name, value in shares.items()})
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum((part[name] for part in parts if name in part), 0.0) for name in names}


def check_first_tokens(batch: FlatBatch) -> None:
    """Raise if the first token of a sequence is to be predicted."""
    firsts = batch.offsets[:-1][batch.lengths > 0]
    if bool(batch.mask[firsts].any()):
        index = int(batch.mask[firsts].nonzero()[0])
        raise EngineError(
            f"sequence {index} of a micro-batch: its first token is marked as generated, but has no preceding token to "
            "predict it from; every sequence needs a prompt of at least one token"
        )


CONTENTS = {"model": ("model", "base"), "optimizer": ("optimizer",), "extra": ("schedule", "rng", "policy")}
"""Setting -> parts of an engine's state."""


def select_contents(
    states: Mapping[str, dict[str, Any]], contents: Mapping[str, Collection[str]] | None
) -> dict[str, dict[str, Any]]:
    """Return the wanted parts of each folder's state, all of them by default; folders without any are dropped.

    >>> select_contents({"actor": {"model": 1, "rng": 2}, "critic": {"model": 3}}, {"actor": ["extra"], "critic": []})
    {'actor': {'rng': 2}}
    """
    selected = {}
    for folder, state in states.items():
        wanted = {part for content in (contents or {}).get(folder, CONTENTS) for part in CONTENTS.get(content, ())}
        selected[folder] = {part: value for part, value in state.items() if part in wanted}
    return {folder: state for folder, state in selected.items() if state}
