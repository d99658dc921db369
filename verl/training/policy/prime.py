"""PRIME: an implicit process reward model, trained along with the policy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from verl.algorithms.objective import ModelOutput, OutcomeObjective
from verl.data.flat_batch import FlatBatch
from verl.data.plan import RaggedIndices, Updates
from verl.training.engine import TrainEngine, compute_logprobs


class PrimeRewardModel:
    """A language model whose log-ratio to its initial weights is the reward of a token: coef * beta * (lp - lp_ref).

    It is trained to predict whether a response is correct from the sum over its tokens. A score from 0 to 1 is taken as
    the probability of being correct; scores outside are clamped.
    """

    def __init__(
        self, model: TrainEngine[ModelOutput], reference: TrainEngine[ModelOutput], *, beta: float, coef: float
    ) -> None:
        self.model, self._reference, self._beta, self._coef = model, reference, beta, coef
        self._objective = OutcomeObjective(beta)
        self._batch = FlatBatch.empty()

    def prepare(self, batch: FlatBatch, cuts: RaggedIndices, scores: Tensor) -> Tensor:
        """Return the rewards of all tokens [T] under the current weights; the scores [B] are kept for `update`."""
        ref = compute_logprobs(self._reference, batch, cuts)
        outcomes = scores.clamp(0.0, 1.0).float()[batch.segment_ids]
        self._batch = batch.with_(ref_logprobs=ref, returns=outcomes)
        log_ratio = torch.where(batch.mask, compute_logprobs(self.model, batch, cuts) - ref, 0.0)
        return self._coef * self._beta * log_ratio.double()

    def update(self, updates: Updates) -> Iterator[dict[str, float]]:
        """Run the planned optimizer steps and yield the metrics of each."""
        for micro_batches in updates:
            yield self.model.update(self._batch.split(micro_batches), self._objective)
        self._batch = FlatBatch.empty()
