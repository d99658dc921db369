"""One rank's part of a step: what is computed from samples before the update, and the update itself.

Between `prepare` and `update` all arrays stay here; what other ranks must know is a few numbers per sample.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages import ESTIMATORS, AdvantageInputs, Estimator, explained_variance
from verl.algorithms.aggregate import segment_sum
from verl.algorithms.correction import importance_weights, mismatch_metrics, mismatch_moments, rejection_mask
from verl.algorithms.kl import EXACT, kl_penalty
from verl.algorithms.losses import LOSSES, LossFunction
from verl.algorithms.objective import OutcomeObjective, PolicyObjective, ValueObjective, make_loss_inputs
from verl.algorithms.prepass import PREPASSES, Prepass, token_noise
from verl.algorithms.settings import AlgorithmSettings
from verl.custom_functions import load_function
from verl.data.flat_batch import FlatBatch
from verl.data.plan import RaggedIndices, RankPlan, Updates
from verl.errors import ConfigError
from verl.training.contents import select_contents
from verl.training.engine import ModelOutput, TrainEngine, ValueOutput
from verl.types import Sample

__all__ = ["PolicyTrainer", "PrimeRewardModel", "load_functions"]

Engine = TrainEngine[ModelOutput]


class PolicyTrainer:
    """The model that is trained, and what its method needs beside it. Collective: all ranks call a method together."""

    def __init__(
        self,
        actor: Engine,
        algorithm: AlgorithmSettings | None = None,
        *,
        reference: Engine | None = None,
        critic: TrainEngine[ValueOutput] | None = None,
        prime: PrimeRewardModel | None = None,
    ) -> None:
        self.actor, self.reference, self.critic, self.prime = actor, reference, critic, prime
        self.algorithm = algorithm = algorithm or AlgorithmSettings()
        self._estimator, _ = load_functions(algorithm)
        self._objective = PolicyObjective(
            loss_mode=algorithm.loss_mode,
            options=algorithm.loss_options,
            agg_mode=algorithm.agg_mode,
            scale=algorithm.scale,
            entropy_coeff=algorithm.entropy_coeff,
            kl_coef=algorithm.loss_kl_coef,
            kl_type=algorithm.loss_kl_type,
        )
        self._value_objective = ValueObjective(algorithm.value_clip, algorithm.value_agg_mode, algorithm.scale)
        self._reward_kl = algorithm.reward_kl
        self._steps = 0
        self._forget()

    def prepare(self, samples: Sequence[Sample], plan: RankPlan) -> dict[str, float]:
        """All that the update needs of this rank's samples: log-probs, values, rewards, advantages. They wait here."""
        batch = FlatBatch.from_samples(samples)
        exact = self.reference if self._reward_kl is not None and self.algorithm.reward_kl_type == EXACT else None
        outputs = self.actor.forward(batch.split(plan.forward), reference=exact)
        batch = batch.with_(old_logprobs=_in_order(batch, plan.forward, [output.logprobs for output in outputs]))
        if self.reference is not None:
            batch = batch.with_(ref_logprobs=batch_logprobs(self.reference, batch, plan.forward))
        if self.critic is not None:
            values = [output.values for output in self.critic.forward(batch.split(plan.forward))]
            batch = batch.with_(values=_in_order(batch, plan.forward, values))
        kl = (
            None
            if exact is None
            else _in_order(batch, plan.forward, [output.kl for output in outputs if output.kl is not None])
        )
        self._episodes, metrics = self._rewarded(batch, plan, kl)
        if self.prime is not None:
            process = self.prime.prepare(batch, plan.forward, torch.from_numpy(plan.scores))
            self._episodes = replace(self._episodes, process=process)
        batch, estimated = self._estimated(batch, self._episodes)
        self._batch, corrected = self._corrected(batch)
        return metrics | estimated | corrected

    def update(self, plan: RankPlan) -> dict[str, float]:
        """The optimiser steps that the plan foresees. Metrics are means over them; skipped steps are counted."""
        metrics: dict[str, float] = {}
        if self.critic is not None and plan.critic is not None:
            batch = self._batch.with_(mask=self._episodes.mask)  # what is rejected for the policy is still true
            steps = [self.critic.update(batch.split(parts), self._value_objective) for parts in plan.critic]
            metrics |= _over_steps(steps, "critic")
        if self.prime is not None:
            metrics |= _over_steps(list(self.prime.update(plan.policy)), "process")
        if self._steps >= self.algorithm.critic_warmup:
            metrics |= _over_steps(list(self._policy_steps(plan)), "actor")
        self._steps += 1
        every = self.algorithm.ref_update_freq
        if self.reference is not None and every > 0 and self._steps % every == 0:
            self.reference.copy_weights_from(self.actor)
        self._forget()
        return metrics

    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs at temperature 1 of every token but the first of each sequence: the trainer's side of the probe."""
        batch = FlatBatch(
            tokens=torch.tensor([token for sequence in sequences for token in sequence]),
            offsets=torch.tensor([0, *np.cumsum([len(sequence) for sequence in sequences])]),
            mask=torch.tensor([place > 0 for sequence in sequences for place in range(len(sequence))]),
        )
        logprobs = self.actor.forward([batch], temperature=1.0)[0].logprobs
        return [part[1:].tolist() for part in logprobs.split(batch.lengths.tolist())]

    def states(self, contents: Mapping[str, Collection[str]] | None = None) -> dict[str, dict[str, Any]]:
        """What a checkpoint must hold, by folder. A reference that never changes is not kept.

        `contents` says what is wanted of a folder (model, optimizer, extra); all of it, where it says nothing.
        """
        own = {"steps": self._steps, "kl_beta": 0.0 if self._reward_kl is None else self._reward_kl.beta}
        states = {"actor": self.actor.state() | {"policy": own}}
        if self.critic is not None:
            states["critic"] = self.critic.state()
        if self.prime is not None:
            states["process"] = self.prime.model.state()
        if self.reference is not None and self.algorithm.ref_update_freq > 0:
            states["reference"] = self.reference.state()
        return select_contents(states, contents)

    def load_states(self, states: dict[str, dict[str, Any]]) -> None:
        """The inverse of `states`; what is not in them stays as it is."""
        actor = states.get("actor", {})
        if (own := actor.get("policy")) is not None:
            self._steps = int(own["steps"])
            if self._reward_kl is not None and self._reward_kl.adaptive and own["kl_beta"]:  # else as the settings say
                self._reward_kl = replace(self._reward_kl, beta=float(own["kl_beta"]))
        self.actor.load_state(actor)
        if self.critic is not None:
            self.critic.load_state(states.get("critic", {}))
        if self.prime is not None:
            self.prime.model.load_state(states.get("process", {}))
        if self.reference is not None:
            self.reference.load_state(states.get("reference", {}))

    def _rewarded(
        self, batch: FlatBatch, plan: RankPlan, kl: Tensor | None
    ) -> tuple[AdvantageInputs, dict[str, float]]:
        """The score of each sample on its last generated token, less the KL to the reference on all of them."""
        scores, rewards = torch.from_numpy(plan.scores), torch.zeros(batch.num_tokens, dtype=torch.float64)
        places, sequences = _last_generated(batch)
        rewards[places] = scores[sequences]
        penalty = torch.zeros_like(rewards)
        if self._reward_kl is not None:
            if kl is None:
                assert batch.old_logprobs is not None
                assert batch.ref_logprobs is not None
                kl = kl_penalty(batch.old_logprobs, batch.ref_logprobs, self.algorithm.reward_kl_type)
            kl = kl.double() * batch.mask
            penalty = self._reward_kl.beta * kl
        episodes = AdvantageInputs(
            scores=scores - segment_sum(penalty, batch.offsets),
            groups=torch.from_numpy(plan.groups),
            mask=batch.mask,
            offsets=batch.offsets,
            rewards=rewards - penalty,
            values=None if batch.values is None else batch.values.double(),
            baselines=None if plan.baselines is None else torch.from_numpy(plan.baselines),
            options=self.algorithm.estimator_options,
            rank=self.actor.rank,
            gather=self.actor.gather,
        )
        metrics = {}
        if batch.old_logprobs is not None and batch.ref_logprobs is not None:
            distance = kl_penalty(batch.old_logprobs, batch.ref_logprobs, "k3").double() * batch.mask
            total, tokens = episodes.total(distance, batch.mask)
            metrics["actor/kl"] = total / max(tokens, 1.0)
        if self._reward_kl is None or kl is None:
            return episodes, metrics
        total, tokens, samples = episodes.total(kl, batch.mask, torch.ones_like(scores))
        metrics |= {"actor/reward_kl": total / max(tokens, 1.0), "actor/reward_kl_coef": self._reward_kl.beta}
        self._reward_kl = self._reward_kl.after(metrics["actor/reward_kl"], int(samples))
        return episodes, metrics

    def _estimated(self, batch: FlatBatch, episodes: AdvantageInputs) -> tuple[FlatBatch, dict[str, float]]:
        estimate = self._estimator(episodes)
        advantages, returns = estimate if isinstance(estimate, tuple) else (estimate, None)
        if self.critic is not None and returns is None:
            wrong = f"algorithm.adv_estimator={self.algorithm.estimator} returned advantages and no returns"
            raise ConfigError([f"critic.enable: {wrong} to train it on; return both, or set critic.enable=false"])
        batch = batch.with_(advantages=advantages.float(), returns=None if returns is None else returns.float())
        if returns is None or episodes.values is None:
            return batch, {}
        return batch, {"critic/explained_variance": explained_variance(episodes, returns)}

    def _corrected(self, batch: FlatBatch) -> tuple[FlatBatch, dict[str, float]]:
        """The mismatch with the engine that generated: measured always, corrected where the method says so."""
        assert batch.old_logprobs is not None
        assert batch.rollout_logprobs is not None
        pair, correction = (batch.old_logprobs, batch.rollout_logprobs), self.algorithm.correction
        moments = mismatch_moments(*pair, batch.mask)
        metrics = mismatch_metrics(self.actor.gather(moments[None]))
        mask, weights = batch.mask, None
        if correction.weigh is not None:
            weights = importance_weights(*pair, mask, batch.offsets, correction, self.actor.gather)
            tokens, total, squares = self._episodes.total(mask, weights, weights.square())
            metrics["training/rollout_is_ess"] = total * total / (tokens * squares) if squares else 0.0
        if correction.reject is not None:
            mask = rejection_mask(*pair, batch.mask, batch.offsets, correction)
            before, after = self._episodes.total(batch.mask, mask)
            metrics["training/rollout_rejected"] = 1.0 - after / max(before, 1.0)
        return batch.with_(mask=mask, weights=weights), metrics

    def _policy_steps(self, plan: RankPlan) -> Iterator[dict[str, float]]:
        prepass = PREPASSES.get(self.algorithm.loss_mode)
        exact = self.algorithm.loss_kl_coef is not None and self.algorithm.loss_kl_type == EXACT
        update = partial(self.actor.update, loss=self._objective, reference=self.reference if exact else None)
        for step, parts in enumerate(plan.policy):
            if prepass is None:
                yield update(self._batch.split(parts))
            else:
                micro_batches, found = self._run_prepass(prepass, parts, plan, updated=step > 0)
                yield update(micro_batches) | found

    def _run_prepass(
        self, prepass: Prepass, parts: Sequence[np.ndarray], plan: RankPlan, *, updated: bool
    ) -> tuple[list[FlatBatch], dict[str, float]]:
        """The micro-batches of a mini-batch, with what the loss must know of all of it; and numbers for the user."""
        chosen = torch.from_numpy(np.concatenate(parts)).long()
        batch = self._batch.select(chosen)
        cuts = np.split(np.arange(len(chosen)), np.cumsum([*map(len, parts)]))[:-1]
        logprobs = batch.old_logprobs  # those of now, as long as nothing has been updated
        if updated:
            logprobs = torch.cat([output.logprobs for output in self.actor.forward(batch.split(cuts))])
        assert logprobs is not None
        episodes = self._episodes.select(chosen, batch.mask, batch.offsets)
        numbers = torch.from_numpy(plan.numbers)[chosen]
        noise = token_noise(episodes.groups[batch.segment_ids], numbers[batch.segment_ids], batch.positions)
        found = prepass(make_loss_inputs(logprobs, batch), episodes, noise, self.algorithm.loss_options)
        return batch.with_(**found.fields).split(cuts), found.metrics

    def _forget(self) -> None:
        self._batch = FlatBatch.empty()


class PrimeRewardModel:
    """PRIME: a language model whose log-ratio to the one it started from is the reward of a token.

    It is trained along, to tell right answers from wrong ones by the sum over their tokens. A score from 0 to 1 is
    taken for the chance of being right, and what lies outside is cut off.
    """

    def __init__(self, model: Engine, reference: Engine, *, beta: float, coef: float) -> None:
        self.model, self._reference, self._beta, self._coef = model, reference, beta, coef
        self._objective = OutcomeObjective(beta)
        self._batch = FlatBatch.empty()

    def prepare(self, batch: FlatBatch, cuts: RaggedIndices, scores: Tensor) -> Tensor:
        """The rewards of all tokens [T], by the model as it is now; outcomes [B] are kept for its update."""
        ref = batch_logprobs(self._reference, batch, cuts)
        outcomes = scores.clamp(0.0, 1.0).float()[batch.segment_ids]
        self._batch = batch.with_(ref_logprobs=ref, returns=outcomes)
        gain = torch.where(batch.mask, batch_logprobs(self.model, batch, cuts) - ref, 0.0)
        return self._coef * self._beta * gain.double()

    def update(self, updates: Updates) -> Iterator[dict[str, float]]:
        """The optimiser steps that the plan foresees."""
        for parts in updates:
            yield self.model.update(self._batch.split(parts), self._objective)
        self._batch = FlatBatch.empty()


def load_functions(algorithm: AlgorithmSettings) -> tuple[Estimator, LossFunction]:
    """The estimator and the loss that a method names: the user's own are looked for before any model is loaded."""
    try:
        return (
            load_function(algorithm.estimator, ESTIMATORS, "algorithm.adv_estimator"),
            load_function(algorithm.loss_mode, LOSSES, "actor_rollout_ref.actor.policy_loss.loss_mode"),
        )
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def batch_logprobs(engine: Engine, batch: FlatBatch, cuts: RaggedIndices) -> Tensor:
    """Log-probs [T] of a batch, computed micro-batch by micro-batch."""
    return _in_order(batch, cuts, [output.logprobs for output in engine.forward(batch.split(cuts))])


def _in_order(batch: FlatBatch, cuts: RaggedIndices, parts: Sequence[Tensor]) -> Tensor:
    """Values that were computed micro-batch by micro-batch, back in the order of the batch's tokens [T]."""
    places = batch.with_(tokens=torch.arange(batch.num_tokens)).select(cuts.indices).tokens
    values = torch.zeros(batch.num_tokens, dtype=torch.float32)  # an export in a thread changes torch's default
    values[places] = torch.cat([values[:0], *parts])
    return values


def _last_generated(batch: FlatBatch) -> tuple[Tensor, Tensor]:
    """The place of the last token that the model wrote in each sequence, and that sequence; some may have none."""
    places = batch.mask.nonzero().squeeze(-1)
    sequences = batch.segment_ids[places]
    last = torch.ones_like(sequences, dtype=torch.bool)
    last[:-1] = sequences[1:] != sequences[:-1]
    return places[last], sequences[last]


def _over_steps(steps: Sequence[dict[str, float]], role: str) -> dict[str, float]:
    """Means over the optimiser steps of a model; its last learning rate, and how many steps it skipped."""
    metrics = {name: float(np.mean([step[name] for step in steps if name in step])) for name in steps[0]}
    metrics[f"{role}/skipped_steps"] = sum(step[f"{role}/skipped_steps"] for step in steps)
    metrics[f"{role}/lr"] = steps[-1][f"{role}/lr"]
    return metrics
