"""The model of supervised fine-tuning on one rank: its update and its loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.algorithms.objective import ModelOutput, sft
from verl.data.flat_batch import FlatBatch
from verl.sft.examples import Example, RankBatch
from verl.training.engine import TrainEngine, select_contents
from verl.training.profiler import span


class SFTModel:
    """Trains a model by negative log-likelihood, averaged over the trained tokens of the whole batch over all ranks.
    Every method is collective."""

    def __init__(self, engine: TrainEngine[ModelOutput]) -> None:
        self.engine = engine

    @span("update")
    def update(self, rank_batch: RankBatch) -> dict[str, float]:
        """Do one optimizer step; `train/loss` is the loss of the batch before it."""
        metrics = self.engine.update([*map(flatten, rank_batch)], sft)
        self.engine.advance_schedule()
        return metrics

    def loss(self, rank_batch: RankBatch) -> tuple[float, float]:
        """Return the sum of the losses of all trained tokens over all ranks, and their count."""
        batches = [*map(flatten, rank_batch)]
        outputs = self.engine.forward(batches)
        sums = [
            float(torch.where(batch.mask, output.logprobs, 0.0).double().sum())
            for output, batch in zip(outputs, batches, strict=True)
        ]
        mine = torch.tensor([[-sum(sums), float(sum(batch.mask.sum() for batch in batches))]], dtype=torch.float64)
        total, tokens = self.engine.gather(mine).sum(0).tolist()
        return total, tokens

    def engines(self) -> dict[str, TrainEngine[Any]]:
        """Return the engine by its folder in a checkpoint."""
        return {"actor": self.engine}

    def states(self, contents: Mapping[str, Collection[str]] | None = None) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint holds, in the same folder as a policy, so that the same tools read both."""
        return select_contents({"actor": self.engine.state()}, contents)

    def load_states(self, states: dict[str, dict[str, Any]]) -> None:
        """Load what `states` returned; what is missing stays as it is."""
        self.engine.load_state(states.get("actor", {}))


def flatten(examples: Sequence[Example]) -> FlatBatch:
    tokens = np.concatenate([np.empty(0, np.int64), *(example.tokens for example in examples)])
    mask = np.concatenate([np.empty(0, np.bool_), *(example.mask for example in examples)])
    offsets = np.cumsum([0, *(len(example.tokens) for example in examples)], dtype=np.int64)
    return FlatBatch(torch.from_numpy(tokens), torch.from_numpy(offsets), torch.from_numpy(mask))
