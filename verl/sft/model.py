"""The model of supervised fine-tuning on one rank: its update and its loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.objective import ModelOutput, sft
from verl.data.flat_batch import FlatBatch
from verl.sft.batches import RankBatch
from verl.training.engine import TrainEngine, select_contents


class SFTModel:
    """Trains a model by negative log-likelihood, averaged over the trained tokens of the whole batch over all ranks.
    Every method is collective."""

    def __init__(self, engine: TrainEngine[ModelOutput]) -> None:
        self.engine = engine

    def update(self, rank_batch: RankBatch) -> dict[str, float]:
        """Do one optimizer step; `train/loss` is the loss of the batch before it."""
        return self.engine.update(_micro_batches(rank_batch), sft)

    def loss(self, rank_batch: RankBatch) -> tuple[float, float]:
        """Return the sum of the losses of all trained tokens over all ranks, and their count."""
        batches = _micro_batches(rank_batch)
        outputs = self.engine.forward(batches)
        sums = [float(_masked(output.logprobs, batch)) for output, batch in zip(outputs, batches, strict=True)]
        mine = torch.tensor([[-sum(sums), float(rank_batch.mask.sum())]], dtype=torch.float64)
        total, tokens = self.engine.gather(mine).sum(0).tolist()
        return total, tokens

    def states(self, contents: Mapping[str, Collection[str]] | None = None) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint holds, in the same folder as a policy, so that the same tools read both."""
        return select_contents({"actor": self.engine.state()}, contents)

    def load_states(self, states: dict[str, dict[str, Any]]) -> None:
        """Load what `states` returned; what is missing stays as it is."""
        self.engine.load_state(states.get("actor", {}))


def _masked(logprobs: Tensor, batch: FlatBatch) -> Tensor:
    return torch.where(batch.mask, logprobs, 0.0).double().sum()


def _micro_batches(rank_batch: RankBatch) -> list[FlatBatch]:
    offsets, bounds = torch.from_numpy(rank_batch.offsets), [0, *rank_batch.ends.tolist()]
    tokens, mask = torch.from_numpy(rank_batch.tokens).long(), torch.from_numpy(rank_batch.mask)
    batches = []
    for first, last in pairwise(bounds):
        inside = offsets[first : last + 1]
        part = slice(int(inside[0]), int(inside[-1]))
        batches.append(FlatBatch(tokens[part], inside - inside[0], mask[part]))
    return batches
