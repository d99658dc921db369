"""The reward model of PRIME, which is trained with the policy and rewards every token."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.advantages import AdvantageInputs
from verl.algorithms.objective import ModelOutput, OutcomeObjective
from verl.algorithms.prepass import prepass_log_ratio
from verl.data.flat_batch import FlatBatch
from verl.data.plan import RankPlan
from verl.training.engine import ReferenceEngine, TrainEngine
from verl.training.policy.passes import average_steps, compute_logprobs, run_prepass


class PrimeRewardModel:
    """A language model whose log-ratio to its initial weights is the reward of a token: beta * (lp - lp_ref).

    It is trained to predict whether a response is correct from the sum over its tokens. A score from 0 to 1 is taken as
    the probability of being correct; scores outside are clamped.
    """

    def __init__(
        self, model: TrainEngine[ModelOutput], reference: ReferenceEngine[ModelOutput], *, beta: float
    ) -> None:
        self.model, self._reference, self._beta = model, reference, beta
        self._objective = OutcomeObjective(beta)

    def train_and_score(
        self, batch: FlatBatch, inputs: AdvantageInputs, plan: RankPlan
    ) -> tuple[Tensor, dict[str, float]]:
        """Train on the outcomes of the samples, then return the rewards of all tokens [T] and the metrics.

        A model that has not seen these samples would reward their tokens almost at random at first, and the rewards
        are normalized whatever their size: the policy would unlearn.
        """
        batch = batch.with_(kept_ids=None)  # rewards are log-ratios of the whole vocabulary
        ref = compute_logprobs(self._reference, batch, plan.forward)
        outcomes = torch.from_numpy(plan.scores).clamp(0.0, 1.0).float()[batch.segment_ids]
        batch = batch.with_(old_logprobs=ref, advantages=outcomes)
        steps = []
        for parts in plan.policy:
            micro_batches = batch.split(parts)
            if batch.shares is not None:
                micro_batches, _ = run_prepass([prepass_log_ratio], self.model, batch, inputs, parts)
            steps.append(self.model.update(micro_batches, self._objective))
        log_ratio = torch.where(batch.mask, compute_logprobs(self.model, batch, plan.forward) - ref, 0.0)
        return self._beta * log_ratio.double(), average_steps(steps, "process")
