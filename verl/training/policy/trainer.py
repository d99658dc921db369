"""One rank's part of a training step: everything computed from samples before the update, and the update itself.

Between `prepare` and `update` all arrays stay on the rank; other ranks receive only a few numbers per sample.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages import ESTIMATORS, USE_SQUARES, AdvantageInputs, Estimator, explained_variance
from verl.algorithms.aggregate import segment_sum
from verl.algorithms.correction import MISMATCH_METRICS, correct_mismatch, count_episode_tokens, importance_weights
from verl.algorithms.losses import (
    EXACT_KL,
    LOSSES,
    LossFunction,
    clamp_teacher_kl,
    estimate_teacher_kl,
    kl_penalty,
)
from verl.algorithms.objective import (
    ModelOutput,
    PolicyObjective,
    ValueObjective,
    ValueOutput,
    average_weights,
)
from verl.algorithms.prepass import BRANCH_PREPASSES, PREPASSES, Prepass, prepass_correction, prepass_lag
from verl.algorithms.settings import AlgorithmSettings
from verl.custom_functions import load_function
from verl.data.flat_batch import FlatBatch
from verl.data.plan import RankPlan
from verl.errors import ConfigError
from verl.training.engine import Loss, ReferenceEngine, TrainEngine, select_contents
from verl.training.policy.passes import average_steps, compute_logprobs, restore_order, run_prepass
from verl.training.policy.prime import PrimeRewardModel
from verl.training.policy.teacher import TeacherEngine
from verl.training.profiler import span
from verl.types import Sample


class PolicyTrainer:
    """Trains a policy with an algorithm, and with the other models that it needs.

    Collective: all ranks call a method together.
    """

    def __init__(
        self,
        actor: TrainEngine[ModelOutput],
        algorithm: AlgorithmSettings | None = None,
        *,
        reference: ReferenceEngine[ModelOutput] | None = None,
        critic: TrainEngine[ValueOutput] | None = None,
        prime: PrimeRewardModel | None = None,
        teacher: ReferenceEngine[ModelOutput] | None = None,
    ) -> None:
        self.actor, self.reference, self.critic, self.prime = actor, reference, critic, prime
        self.algorithm = algorithm = algorithm or AlgorithmSettings()
        self.teacher = None if teacher is None else TeacherEngine(teacher, algorithm.distillation)
        self._estimator, _ = load_functions(algorithm)
        self._value_objective = ValueObjective(algorithm)
        self.objective: Loss[ModelOutput] = PolicyObjective(algorithm)
        """What an update of the policy minimizes. A replay observes it."""
        self._reward_kl = algorithm.reward_kl
        self._uses_squares = algorithm.estimator in USE_SQUARES
        self._distills_in_loss = algorithm.distillation is not None and algorithm.distillation.mode == "loss"
        self._steps = 0
        self._batch = FlatBatch.empty()

    @span("prepare")
    def prepare(self, samples: Sequence[Sample], plan: RankPlan) -> dict[str, float]:
        """Compute log-probs, values, rewards and advantages of this rank's samples, and keep them for `update`."""
        batch = FlatBatch.from_samples(samples, has_branches=plan.branches is not None)
        batch, kl, squares = self._run_models(batch, plan)
        self._inputs, metrics = self._compute_rewards(batch, plan, kl, squares)
        self._inputs = replace(self._inputs, turns=_list_turns(samples, batch.offsets))
        if self.prime is not None:
            process, process_metrics = self.prime.train_and_score(batch, self._inputs, plan)
            self._inputs, metrics = replace(self._inputs, process=process), metrics | process_metrics
        batch, advantage_metrics = self._estimate_advantages(batch)
        if self.algorithm.mask_truncated:
            is_whole = torch.tensor([sample.finish_reason != "length" for sample in samples], dtype=torch.bool)
            batch = batch.with_(mask=batch.mask & is_whole[batch.segment_ids])
        batch, mismatch = self._correct_mismatch(batch)
        self._batch = self._average_episodes(batch)
        return metrics | advantage_metrics | mismatch

    @span("update")
    def update(self, plan: RankPlan) -> dict[str, float]:
        """Run the planned optimizer steps and return means of their metrics; skipped steps are summed."""
        metrics: dict[str, float] = {}
        if self.critic is not None and plan.critic is not None:
            # Tokens rejected for the policy still train the critic.
            batch = self._batch.with_(mask=self._inputs.mask, **count_episode_tokens(self._inputs))
            with span("critic update"):
                steps = [self.critic.update(batch.split(parts), self._value_objective) for parts in plan.critic]
            self.critic.advance_schedule()
            metrics |= average_steps(steps, "critic")
        if self._steps >= self.algorithm.critic_warmup:
            with span("actor update"):
                metrics |= average_steps(list(self._update_actor(plan)), "actor")
            self.actor.advance_schedule()
        self._steps += 1
        every = self.algorithm.ref_update_freq
        if isinstance(self.reference, TrainEngine) and every > 0 and self._steps % every == 0:
            self.reference.copy_weights_from(self.actor, self.algorithm.ref_update_ratio)
        self._batch = FlatBatch.empty()
        return metrics

    def read_tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return old log-probs and advantages of the tokens of a sample, between `prepare` and `update`."""
        start, end = self._batch.offsets[index : index + 2].tolist()
        values = (self._batch.old_logprobs, self._batch.advantages)
        old_logprobs, advantages = (torch.zeros(end - start) if each is None else each[start:end] for each in values)
        return old_logprobs.float().cpu().numpy(), advantages.float().cpu().numpy()

    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probs at temperature 1 of every token but the first of each sequence."""
        batch = FlatBatch(
            tokens=torch.tensor([token for sequence in sequences for token in sequence]),
            offsets=torch.tensor([0, *np.cumsum([len(sequence) for sequence in sequences])]),
            mask=torch.tensor([index > 0 for sequence in sequences for index in range(len(sequence))]),
        )
        logprobs = self.actor.forward([batch], temperature=1.0)[0].logprobs
        return [part[1:].tolist() for part in logprobs.split(batch.lengths.tolist())]

    def measure_rounding(self, sequences: Sequence[Sequence[int]], dtype: str) -> float | None:
        """Return how far rounding to `dtype` moves the log-probs on average; None if the engine cannot simulate it."""
        noise = self.actor.rounding_noise(dtype)
        if noise is None:
            return None
        exact = self.compute_logprobs(sequences)
        with noise:
            rounded = self.compute_logprobs(sequences)
        return float(np.abs(np.concatenate(exact) - np.concatenate(rounded)).mean())

    def states(self, contents: Mapping[str, Collection[str]] | None = None) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint must hold, by folder; a reference only if it is ever updated, a teacher never.

        `contents` names what to save per folder (model, optimizer, extra); everything for folders that it lacks.
        """
        states = {folder: engine.state() for folder, engine in self.engines().items()}
        beta = 0.0 if self._reward_kl is None else self._reward_kl.beta
        states["actor"] = {**states["actor"], "policy": {"steps": self._steps, "kl_beta": beta}}
        return select_contents(states, contents)

    def load_states(self, states: dict[str, dict[str, Any]]) -> None:
        """Restore `states`. What they lack is left unchanged."""
        if (policy := states.get("actor", {}).get("policy")) is not None:
            self._steps = int(policy["steps"])
            if self._reward_kl is not None and self._reward_kl.adaptive and policy["kl_beta"]:
                self._reward_kl = replace(self._reward_kl, beta=float(policy["kl_beta"]))
        for folder, engine in self.engines().items():
            engine.load_state(states.get(folder, {}))

    def engines(self) -> dict[str, TrainEngine[Any]]:
        """Return the engines whose weights change, by their folder in a checkpoint."""
        prime = None if self.prime is None else self.prime.model
        reference = self.reference if self.algorithm.ref_update_freq > 0 else None
        engines = {"actor": self.actor, "critic": self.critic, "process": prime, "reference": reference}
        return {folder: engine for folder, engine in engines.items() if isinstance(engine, TrainEngine)}

    def _run_models(self, batch: FlatBatch, plan: RankPlan) -> tuple[FlatBatch, Tensor | None, Tensor | None]:
        """Add log-probs and values to a batch.

        Also return what only the advantages need: the exact KL and the sums of squared probabilities, both [T].
        """
        cuts = plan.forward
        exact = self.reference if self._reward_kl is not None and self.algorithm.reward_kl_type == EXACT_KL else None
        outputs: list[ModelOutput] = []
        if self.algorithm.correction.bypass:
            batch = batch.with_(old_logprobs=batch.rollout_logprobs)
        else:
            with span("old log-probs"):
                outputs = self.actor.forward(batch.split(cuts), reference=exact, with_squares=self._uses_squares)
            batch = batch.with_(old_logprobs=restore_order(batch, cuts, [output.logprobs for output in outputs]))
            if routed := [output.routed_experts for output in outputs if output.routed_experts is not None]:
                batch = batch.with_(routed_experts=restore_order(batch, cuts, routed))
        if self.reference is not None:
            with span("reference log-probs"):
                batch = batch.with_(ref_logprobs=compute_logprobs(self.reference, batch, plan.reference))
        if self.teacher is not None and not self._distills_in_loss:
            with span("teacher log-probs"):
                batch = batch.with_(teacher_logprobs=compute_logprobs(self.teacher, batch, plan.reference))
        if self.critic is not None:
            with span("values"):
                values = [output.values for output in self.critic.forward(batch.split(cuts))]
            batch = batch.with_(values=restore_order(batch, cuts, values))

        def restore(parts: Iterable[Tensor | None]) -> Tensor:
            return restore_order(batch, cuts, [part for part in parts if part is not None])

        uses_squares = self._uses_squares and not self.algorithm.correction.bypass
        kl = None if exact is None else restore(output.kl for output in outputs)
        return batch, kl, restore(output.sum_pi_squared for output in outputs) if uses_squares else None

    def _compute_rewards(
        self, batch: FlatBatch, plan: RankPlan, kl: Tensor | None, squares: Tensor | None
    ) -> tuple[AdvantageInputs, dict[str, float]]:
        """Put rewards of turns on their last tokens and the rest of each score on the last generated token.

        The KL penalty is subtracted from all generated tokens.
        """
        scores, rewards = torch.from_numpy(plan.scores), torch.zeros(batch.num_tokens, dtype=torch.float64)
        indices, sequences = _last_generated(batch)
        rewards[indices] = scores[sequences]
        if batch.turn_rewards is not None:
            turns = batch.turn_rewards.double()
            rewards[indices] -= segment_sum(turns, batch.offsets)[sequences]
            rewards += turns
        inputs = AdvantageInputs(
            scores=scores,
            groups=torch.from_numpy(plan.groups),
            mask=batch.mask,
            offsets=batch.offsets,
            rewards=rewards,
            values=None if batch.values is None else batch.values.double(),
            baselines=None if plan.baselines is None else torch.from_numpy(plan.baselines),
            logprobs=None if batch.old_logprobs is None else batch.old_logprobs.double(),
            sum_pi_squared=None if squares is None else squares.double(),
            components={name: torch.from_numpy(values) for name, values in plan.components.items()},
            episodes=torch.from_numpy(plan.indices),
            branches=None if plan.branches is None else torch.from_numpy(plan.branches),
            token_shares=None if batch.shares is None else batch.shares.double(),
            options=self.algorithm.estimator_options,
            rank=self.actor.data_rank,
            gather=self.actor.gather,
        )
        metrics = _prefix("critic/score", inputs.describe(scores, inputs.episode_shares))
        if batch.ref_logprobs is not None:
            metrics["actor/kl"] = inputs.token_mean(_estimate_kl(batch, batch.ref_logprobs, "k3"))
        if self._reward_kl is not None:
            kind = self.algorithm.reward_kl_type
            kl = _estimate_kl(batch, batch.ref_logprobs, kind) if kl is None else kl.double() * batch.mask
            penalty, kl_mean = self._reward_kl.beta * kl, inputs.token_mean(kl)
            inputs = replace(inputs, scores=scores - inputs.sum_episodes(penalty), rewards=rewards - penalty)
            metrics |= {"actor/reward_kl": kl_mean, "actor/reward_kl_coef": self._reward_kl.beta}
            self._reward_kl = self._reward_kl.after(kl_mean, round(inputs.total(inputs.episode_shares)[0]))
        metrics |= _prefix("critic/rewards", inputs.describe(inputs.scores, inputs.episode_shares))
        if self._uses_squares and self.algorithm.correction.weigh is not None:
            weights = importance_weights(inputs, *_get_pair(batch), self.algorithm.correction)
            inputs = replace(inputs, importance=weights.double())
        return inputs, metrics

    @span("advantages")
    def _estimate_advantages(self, batch: FlatBatch) -> tuple[FlatBatch, dict[str, float]]:
        estimate = self._estimator(self._inputs)
        advantages, returns = estimate if isinstance(estimate, tuple) else (estimate, None)
        if self.critic is not None and returns is None:
            problem = f"algorithm.adv_estimator={self.algorithm.estimator} returned advantages but no returns"
            raise ConfigError([f"critic.enable: {problem} to train it on; return both, or set critic.enable=false"])
        metrics: dict[str, float] = {}
        if self.algorithm.distillation is not None and batch.teacher_logprobs is not None:
            penalty, metrics = self._penalize_by_teacher(batch)
            advantages = advantages - penalty
        batch = batch.with_(advantages=advantages.float(), returns=None if returns is None else returns.float())
        weights = self._inputs.token_weights[batch.mask]
        metrics |= _prefix("critic/advantages", self._inputs.describe(advantages[batch.mask], weights))
        if returns is not None and self._inputs.values is not None:
            metrics |= _prefix("critic/returns", self._inputs.describe(returns[batch.mask], weights))
            metrics["critic/explained_variance"] = explained_variance(self._inputs, returns)
        return batch, metrics

    def _penalize_by_teacher(self, batch: FlatBatch) -> tuple[Tensor, dict[str, float]]:
        """Return what the teacher's log-probs take from the advantage of each generated token [T], and the metrics."""
        options = self.algorithm.distillation
        assert options is not None
        assert batch.old_logprobs is not None
        assert batch.teacher_logprobs is not None
        kl = estimate_teacher_kl(batch.old_logprobs, batch.teacher_logprobs, options).double() * batch.mask
        clamped, is_clamped = clamp_teacher_kl(kl, options)
        metrics = {"actor/distillation_kl": self._inputs.token_mean(kl)}
        if is_clamped is not None:
            metrics["actor/distillation_clipfrac"] = self._inputs.token_mean(is_clamped)
        return options.coef * clamped, metrics

    def _correct_mismatch(self, batch: FlatBatch) -> tuple[FlatBatch, dict[str, float]]:
        """Measure the mismatch with the rollout engine, and correct it if the algorithm says so."""
        inputs = replace(self._inputs, mask=batch.mask)
        fields, metrics = count_episode_tokens(inputs), dict[str, float]()
        if not self.algorithm.correction.bypass:  # otherwise corrected before each update
            corrected, metrics = correct_mismatch(inputs, *_get_pair(batch), self.algorithm.correction)
            fields |= corrected
        return batch.with_(**fields), metrics

    def _average_episodes(self, batch: FlatBatch) -> FlatBatch:
        """Average over an episode, with all of its branches, what a loss of whole sequences averages."""
        mode, inputs = self.algorithm.loss_mode, replace(self._inputs, mask=batch.mask)
        if batch.shares is not None and batch.weights is not None:
            batch = batch.with_(weights=average_weights(batch.weights, mode, inputs.average_episodes))
        if mode == "geo_mean" and batch.advantages is not None:  # also for what depends on the sign of a token's own
            batch = batch.with_(advantages=inputs.average_episodes(batch.advantages))
        return batch

    def _update_actor(self, plan: RankPlan) -> Iterator[dict[str, float]]:
        is_exact = self.algorithm.loss_kl_coef is not None and self.algorithm.loss_kl_type == EXACT_KL
        update = partial(
            self.actor.update,
            loss=self.objective,
            reference=self.reference if is_exact else None,
            teacher=self.teacher if self._distills_in_loss else None,
        )
        prepasses, bypass = self._list_prepasses(), self.algorithm.correction.bypass
        for step, parts in enumerate(plan.policy):
            micro_batches, metrics = self._batch.split(parts), dict[str, float]()
            if prepasses:
                engine = self.actor if step > 0 or bypass else None
                options = self.algorithm.loss_options
                micro_batches, metrics = run_prepass(prepasses, engine, self._batch, self._inputs, parts, options)
            metrics = update(micro_batches) | metrics
            yield metrics if step == 0 else {name: metrics[name] for name in metrics if name not in MISMATCH_METRICS}

    def _list_prepasses(self) -> list[Prepass]:
        correction, mode = self.algorithm.correction, self.algorithm.loss_mode
        prepasses: list[Prepass] = []
        if correction.bypass and (correction.weigh is not None or correction.reject):
            prepasses.append(partial(prepass_correction, correction=correction))
        if self.algorithm.loss_options.off_policy_mask_threshold is not None and self._batch.shares is not None:
            prepasses.append(prepass_lag)
        known = PREPASSES if self._batch.shares is None else PREPASSES | BRANCH_PREPASSES
        return [*prepasses, known[mode]] if mode in known else prepasses


def load_functions(algorithm: AlgorithmSettings) -> tuple[Estimator, LossFunction]:
    """Return the estimator and the loss of an algorithm, loading custom ones; a `ConfigError` if there is none."""
    try:
        return (
            load_function(algorithm.estimator, ESTIMATORS, "algorithm.adv_estimator"),
            load_function(algorithm.loss_mode, LOSSES, "actor_rollout_ref.actor.policy_loss.loss_mode"),
        )
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def _list_turns(samples: Sequence[Sample], offsets: Tensor) -> Tensor:
    """Return the turns of all samples: position of the last token in the batch, index, reward and state, [n, 4]."""
    rows = [
        (start + position, index, reward, state)
        for start, sample in zip(offsets[:-1].tolist(), samples, strict=True)
        for position, index, reward, state in sample.turns or [(len(sample.tokens) - 1, 0, 0.0, 0)]
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)


def _prefix(name: str, statistics: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}/{key}": value for key, value in statistics.items()}


def _estimate_kl(batch: FlatBatch, other_logprobs: Tensor | None, kind: str) -> Tensor:
    """Return an estimate of the KL to another model at each generated token, 0 elsewhere: [T] float64."""
    assert batch.old_logprobs is not None
    assert other_logprobs is not None
    return kl_penalty(batch.old_logprobs, other_logprobs, kind).double() * batch.mask


def _get_pair(batch: FlatBatch) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the policy before the update and of the rollout engine, [T] each."""
    assert batch.old_logprobs is not None
    assert batch.rollout_logprobs is not None
    return batch.old_logprobs, batch.rollout_logprobs


def _last_generated(batch: FlatBatch) -> tuple[Tensor, Tensor]:
    """Return the index of the last generated token of each sequence that has one, and the index of that sequence."""
    indices = batch.mask.nonzero().squeeze(-1)
    sequences = batch.segment_ids[indices]
    is_last = torch.ones_like(sequences, dtype=torch.bool)
    is_last[:-1] = sequences[1:] != sequences[:-1]
    return indices[is_last], sequences[is_last]
