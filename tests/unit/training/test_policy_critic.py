"""Baselines of a step: a critic, and greedy responses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.policy_steps import CRITIC_SIZES, SAMPLES, VOCABULARY, Table, by_token, critic, resumed, step_of
from verl.algorithms.settings import (
    AlgorithmSettings,
    EstimatorOptions,
)
from verl.config.batch_sizes import BatchSizes
from verl.training.policy.trainer import PolicyTrainer

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]


# Critic


def gae_by_hand(values: list[float], rewards: list[float], gamma: float, lam: float) -> list[float]:
    advantages, next_value, next_advantage = [], 0.0, 0.0
    for value, reward in zip(reversed(values), reversed(rewards), strict=True):
        next_advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        next_value = value
        advantages.append(next_advantage)
    return advantages[::-1]


def test_values_become_advantages_and_the_returns_that_the_critic_is_trained_to() -> None:
    known = torch.linspace(-1, 1, VOCABULARY)
    actor, valuer, step = Table(), critic(known), step_of(SAMPLES, **CRITIC_SIZES)
    metrics = step.run(PolicyTrainer(actor, AlgorithmSettings("gae", EstimatorOptions(0.9, 0.8)), critic=valuer))
    (trained,), (policy,) = valuer.seen, actor.seen
    returns, advantages = by_token(trained, trained.returns), by_token(policy, policy.advantages)
    raw = {}
    for one in step.samples:
        indices = one.mask.nonzero()[0]
        values = [float(known[one.tokens[index - 1]]) for index in indices]
        raw[tuple(one.tokens)] = gae_by_hand(
            values, [0.0] * (len(indices) - 1) + [one.score] if len(indices) else [], 0.9, 0.8
        )
        expected = [a + v for a, v in zip(raw[tuple(one.tokens)], values, strict=True)]
        assert returns[tuple(one.tokens)] == pytest.approx(expected, abs=1e-6)
    flat = np.concatenate(list(raw.values()))
    for tokens, numbers in raw.items():
        whitened = (np.array(numbers) - flat.mean()) / math.sqrt(flat.var(ddof=1) + 1e-8)
        assert advantages[tokens] == pytest.approx(whitened, abs=1e-5)
    mask, error = trained.mask, (trained.returns - trained.values)[trained.mask]
    share = 1 - float(error.var(correction=0) / trained.returns[mask].var(correction=0))
    assert metrics["critic/explained_variance"] == pytest.approx(share, abs=1e-4)
    assert {"critic/vf_loss", "critic/grad_norm", "critic/lr", "critic/skipped_steps"} <= metrics.keys()


def test_the_critic_learns_the_returns() -> None:
    step = step_of(SAMPLES, critic=BatchSizes(1, 1, None, epochs=2))
    policy = PolicyTrainer(Table(lr=1e-6), AlgorithmSettings("gae"), critic=critic())
    results = [step.run(policy) for _ in range(25)]
    assert results[-1]["critic/vf_loss"] < 0.5 * results[0]["critic/vf_loss"]
    assert results[-1]["critic/explained_variance"] > 0.3 > results[0]["critic/explained_variance"]
    assert len(policy.critic.seen) == 25 * 2 * 2  # type: ignore[union-attr]


def test_while_the_critic_warms_up_the_policy_stays_as_it_is() -> None:
    actor, valuer, step = Table(), critic(), step_of(SAMPLES, **CRITIC_SIZES)
    policy, start = (
        PolicyTrainer(actor, AlgorithmSettings("gae", critic_warmup=2), critic=valuer),
        actor.table.detach().clone(),
    )
    for number in range(1, 4):
        values = valuer.table.detach().clone()
        metrics = step.run(policy)
        assert not torch.equal(valuer.table, values)
        assert torch.equal(actor.table, start) == (number <= 2)
        assert ("actor/pg_loss" in metrics) == (number > 2)


def test_the_warm_up_of_the_critic_goes_on_where_it_was_saved(tmp_path: Any) -> None:
    def policy() -> PolicyTrainer:
        return PolicyTrainer(Table(), AlgorithmSettings("gae", critic_warmup=2), critic=critic())

    step, whole, saved = step_of(SAMPLES, **CRITIC_SIZES), policy(), policy()
    step.run(saved)
    parts = resumed(policy(), saved, tmp_path)
    expected = [step.run(whole) for _ in range(4)]
    assert [step.run(parts) for _ in range(3)] == expected[1:]
    assert torch.equal(parts.actor.table, whole.actor.table)  # type: ignore[attr-defined]
    assert torch.equal(parts.critic.table, whole.critic.table)  # type: ignore[union-attr]


# Greedy baselines


def test_remax_subtracts_the_score_of_the_greedy_response() -> None:
    samples = [replace(one, baseline=0.5 if one.group == 0 else -1.0) for one in SAMPLES]
    actor, step = Table(), step_of(samples)
    step.run(PolicyTrainer(actor, AlgorithmSettings("remax")))
    advantages = by_token(actor.seen[0], actor.seen[0].advantages)
    for one in samples:
        assert advantages[tuple(one.tokens)] == [one.score - one.baseline] * int(one.mask.sum())


def test_remax_without_greedy_responses_names_what_is_missing() -> None:
    samples = [replace(one, baseline=0.5 if one.group == 0 else None) for one in SAMPLES]
    step = step_of(samples)
    with pytest.raises(ValueError, match="no greedy baseline; run a greedy episode"):
        step.run(PolicyTrainer(Table(), AlgorithmSettings("remax")))
