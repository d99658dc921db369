"""One rank's part of a step: what is computed from samples before the update, and the update itself.

Between `prepare` and `update` all arrays stay here; what other ranks must know is a few numbers per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages import grpo
from verl.algorithms.correction import mismatch_metrics, mismatch_moments
from verl.data.batch import FlatBatch
from verl.data.plan import Cuts, RankPlan
from verl.training.engine import Loss, ModelOutput, TrainEngine
from verl.types import Sample

__all__ = ["Policy"]

Advantages = Callable[[Tensor, Tensor], Tensor]
"""(scores [N], groups [N]) -> advantages [N], over the samples of all ranks."""


class Policy:
    """The model that is trained, with its reference. Collective: all ranks call each method together."""

    def __init__(
        self, actor: TrainEngine, reference: TrainEngine | None, loss: Loss, advantages: Advantages = grpo
    ) -> None:
        self.actor, self.reference = actor, reference
        self._loss, self._advantages = loss, advantages
        self._batch = FlatBatch.empty()

    def prepare(self, samples: Sequence[Sample], plan: RankPlan) -> dict[str, float]:
        """Old and reference log-probs and advantages of this rank's samples; they wait here for `update`."""
        batch = FlatBatch.from_samples(samples)
        cuts = batch.split(plan.forward)
        old = _in_order(batch, plan.forward, self.actor.forward(cuts))
        ref = None if self.reference is None else _in_order(batch, plan.forward, self.reference.forward(cuts))
        advantages = self._advantages_of(plan)[batch.segment_ids] * batch.mask
        self._batch = batch.with_(old_logprobs=old, ref_logprobs=ref, advantages=advantages)
        assert batch.rollout_logprobs is not None
        moments = mismatch_moments(old, batch.rollout_logprobs, batch.mask)
        return mismatch_metrics(self.actor.gather(moments[None]))

    def update(self, plan: RankPlan) -> dict[str, float]:
        """The optimiser steps that the plan foresees. Metrics are means over them; skipped steps are counted."""
        steps = [self.actor.update(self._batch.split(parts), self._loss) for parts in plan.updates()]
        metrics = {name: float(np.mean([step[name] for step in steps if name in step])) for name in steps[0]}
        metrics["actor/skipped_steps"] = sum(step["actor/skipped_steps"] for step in steps)
        metrics["actor/lr"] = steps[-1]["actor/lr"]
        self._batch = FlatBatch.empty()
        return metrics

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs at temperature 1 of every token but the first of each sequence: the trainer's side of the probe."""
        batch = FlatBatch(
            tokens=torch.tensor([token for sequence in sequences for token in sequence]),
            offsets=torch.tensor([0, *np.cumsum([len(sequence) for sequence in sequences])]),
            mask=torch.tensor([place > 0 for sequence in sequences for place in range(len(sequence))]),
        )
        logprobs = self.actor.forward([batch], temperature=1.0)[0].logprobs
        return [part[1:].tolist() for part in logprobs.split(batch.lengths.tolist())]

    def _advantages_of(self, plan: RankPlan) -> Tensor:
        """[n] for this rank's samples, computed from the scores of all ranks."""
        rank = np.full(len(plan), self.actor.rank)
        rows = self.actor.gather(torch.from_numpy(np.stack([rank, plan.groups, plan.scores], axis=1)))
        return self._advantages(rows[:, 2], rows[:, 1].long())[rows[:, 0] == self.actor.rank]


def _in_order(batch: FlatBatch, cuts: Cuts, outputs: Sequence[ModelOutput]) -> Tensor:
    """Log-probs that were computed micro-batch by micro-batch, back in the order of the batch's tokens [T]."""
    places = batch.with_(tokens=torch.arange(batch.num_tokens)).select(cuts.indices).tokens
    logprobs = torch.zeros(batch.num_tokens)
    logprobs[places] = torch.cat([logprobs[:0], *(output.logprobs for output in outputs)])
    return logprobs
