"""A step on samples of an engine whose log-probs differ from the trainer's: measured, weighted, rejected."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.policy_steps import (
    CRITIC_SIZES,
    GENERATED,
    REJECTING,
    SAMPLES,
    VOCABULARY,
    Table,
    by_token,
    critic,
    step_of,
    with_rollout_logprobs,
)
from verl.algorithms.settings import AlgorithmSettings, Correction, Rejection
from verl.data.flat_batch import FlatBatch
from verl.training.policy.trainer import PolicyTrainer

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]

REJECTION = Rejection("sequence", 0.5, 2.0)


def test_the_mismatch_with_the_engine_is_measured_though_nothing_is_corrected() -> None:
    actor = Table()
    step = step_of(with_rollout_logprobs(SAMPLES, actor, {0: 0.5, 3: -0.25}))
    metrics = step.run(PolicyTrainer(actor))
    batch = FlatBatch.from_samples(step.samples)
    p = (
        torch.from_numpy(np.concatenate([one.logprobs for one in with_rollout_logprobs(step.samples, Table())]))[
            batch.mask
        ]
        .exp()
        .double()
    )
    q = batch.rollout_logprobs[batch.mask].exp().double()
    ratio = p / q
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(float((p - q).abs().mean()), rel=1e-4)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(float((p - q).abs().max()), rel=1e-4)
    assert metrics["training/rollout_logprobs_diff_max"] == pytest.approx(0.5, rel=1e-4)
    assert metrics["training/rollout_probs_corr"] == pytest.approx(float(np.corrcoef(p, q)[0, 1]), rel=1e-4)
    assert metrics["training/rollout_ess"] == pytest.approx(
        float(ratio.sum() ** 2 / ratio.square().sum()) / GENERATED, rel=1e-4
    )
    assert "training/rollout_is_ess" not in metrics
    assert "training/rollout_rejected" not in metrics


@pytest.mark.parametrize(("level", "exponent"), [("token", lambda n: 1), ("sequence", lambda n: n)])
def test_importance_weights_multiply_the_loss(level: str, exponent: Any) -> None:
    correction = Correction(weigh=level, threshold=2.0)
    actor, plain = Table(), Table()
    samples = with_rollout_logprobs(SAMPLES, actor, {0: 0.3, 3: -0.25, 4: 0.1})
    expected = {0: 0.3, 3: -0.25, 4: 0.1}
    step = step_of(samples)
    metrics = step.run(PolicyTrainer(actor, AlgorithmSettings(correction=correction)))
    without = step.run(PolicyTrainer(plain))
    batch = actor.seen[0]
    weights, advantages = by_token(batch, batch.weights), by_token(batch, batch.advantages)
    assert advantages == by_token(plain.seen[0], plain.seen[0].advantages)
    drawn = torch.cat([torch.tensor(numbers) for numbers in weights.values()])
    share = float(drawn.sum() ** 2 / drawn.square().sum()) / GENERATED
    assert metrics["training/rollout_is_ess"] == pytest.approx(share, rel=1e-4)
    loss, plain_loss = 0.0, 0.0
    for index, one in enumerate(samples):
        count = int(one.mask.sum())
        weight = min(math.exp(expected.get(index, 0.0) * exponent(count)), 2.0)
        assert weights[tuple(one.tokens)] == pytest.approx([weight] * count, rel=1e-4)
        loss -= weight * sum(advantages[tuple(one.tokens)]) / GENERATED
        plain_loss -= sum(advantages[tuple(one.tokens)]) / GENERATED
    assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-5)  # the ratio to the old policy is still 1
    assert without["actor/pg_loss"] == pytest.approx(plain_loss, abs=1e-5)
    assert abs(loss - plain_loss) > 1e-3
    assert metrics["actor/grad_norm"] != pytest.approx(without["actor/grad_norm"], rel=1e-3)


def test_a_weight_of_one_changes_nothing() -> None:
    actor, plain = Table(), Table()
    step = step_of(with_rollout_logprobs(SAMPLES, actor))
    step.run(
        PolicyTrainer(
            actor,
            AlgorithmSettings(correction=Correction("sequence", normalize=True, reject=(REJECTION,))),
        )
    )
    step.run(PolicyTrainer(plain))
    torch.testing.assert_close(actor.table, plain.table, atol=1e-5, rtol=1e-5)


def test_rejected_tokens_are_dropped_for_the_policy_and_still_count_in_baselines() -> None:
    actor, plain = Table(), Table()
    samples = with_rollout_logprobs(SAMPLES, actor, {0: 1.0, 5: -0.5})  # exp(3) and exp(-0.5): one out, one in
    step = step_of(samples)
    metrics = step.run(PolicyTrainer(actor, AlgorithmSettings(correction=REJECTING)))
    step.run(PolicyTrainer(plain))
    batch, whole = actor.seen[0], plain.seen[0]
    assert [len(numbers) for numbers in by_token(batch, batch.advantages).values()].count(
        0
    ) == 2  # rejected, and silent
    assert not by_token(batch, batch.advantages)[tuple(SAMPLES[0].tokens)]
    assert torch.equal(batch.advantages, whole.advantages)
    assert metrics["training/rollout_rejected"] == pytest.approx(3 / GENERATED)
    without = step_of([one for index, one in enumerate(samples) if index != 0])
    lonely = Table()
    without.run(PolicyTrainer(lonely))
    others = by_token(lonely.seen[0], lonely.seen[0].advantages)
    assert others[tuple(SAMPLES[1].tokens)] != by_token(batch, batch.advantages)[tuple(SAMPLES[1].tokens)]


def test_what_is_rejected_for_the_policy_still_trains_the_critic() -> None:
    actor, valuer = Table(), critic(torch.linspace(-1, 1, VOCABULARY))
    step = step_of(with_rollout_logprobs(SAMPLES, actor, {0: 1.0}), **CRITIC_SIZES)
    step.run(PolicyTrainer(actor, AlgorithmSettings("gae", correction=REJECTING), critic=valuer))
    assert int(actor.seen[0].mask.sum()) == GENERATED - 3
    assert int(valuer.seen[0].mask.sum()) == GENERATED
    assert by_token(valuer.seen[0], valuer.seen[0].returns)[tuple(SAMPLES[0].tokens)] == pytest.approx([1.0] * 3)


def test_an_update_whose_samples_are_all_rejected_is_skipped_and_counted() -> None:
    actor = Table()
    start, step = actor.table.detach().clone(), step_of(with_rollout_logprobs(SAMPLES, actor, 5.0), prompts=1)
    metrics = step.run(
        PolicyTrainer(actor, AlgorithmSettings(correction=Correction(reject=(replace(REJECTION, kind="token"),))))
    )
    assert torch.equal(actor.table, start)
    assert metrics["actor/skipped_steps"] == 2
    assert metrics["training/rollout_rejected"] == 1.0


@pytest.mark.parametrize("gap", [0.0, 0.4])
def test_bypass_measures_the_mismatch_in_the_first_update(gap: float) -> None:
    actor = Table()
    step = step_of(with_rollout_logprobs(SAMPLES, actor, gap), epochs=2)
    batch = FlatBatch.from_samples(step.samples)
    p, q = actor.lookup_logprobs(batch)[batch.mask].exp(), batch.rollout_logprobs[batch.mask].exp()
    metrics = step.run(PolicyTrainer(actor, AlgorithmSettings(correction=Correction(bypass=True))))
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(float((p - q).abs().mean()), abs=1e-6)


def test_bypass_rejects_by_the_policy_before_each_update() -> None:
    actor = Table()
    step = step_of(with_rollout_logprobs(SAMPLES, actor, {0: 5.0}), epochs=2)
    correction = Correction("token", reject=(replace(REJECTION, kind="geometric"),), bypass=True)
    metrics = step.run(PolicyTrainer(actor, AlgorithmSettings(loss_mode="gpg", correction=correction)))
    assert metrics["training/rollout_rejected"] == pytest.approx(3 / GENERATED)
    for batch, table in zip(actor.seen, actor.before, strict=True):
        kept = batch.mask.nonzero().squeeze(-1)
        assert len(kept) == GENERATED - 3
        ratio = (actor.lookup_logprobs(batch, table) - batch.rollout_logprobs)[kept].exp()
        assert batch.weights[kept].tolist() == pytest.approx(ratio.clamp(max=2.0).tolist(), rel=1e-5)
