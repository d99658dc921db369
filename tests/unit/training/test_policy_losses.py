"""A step with each policy loss, with a reference that moves, and with process rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.policy_steps import SAMPLES, Table, algorithm_of, by_token, resumed, sample, step_of, with_rollout_logprobs
from verl.algorithms.losses import LOSSES
from verl.algorithms.settings import (
    AlgorithmSettings,
    LossOptions,
)
from verl.data.flat_batch import FlatBatch
from verl.training.policy.prime import PrimeRewardModel
from verl.training.policy.trainer import PolicyTrainer
from verl.types import Sample

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]


# Losses


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("loss_mode", LOSSES)
def test_the_new_policy_does_not_depend_on_the_micro_batches(loss_mode: str, prompts: int) -> None:
    tables = []
    for micro in (1, 2, 9):
        actor = Table(grad_clip=0.5)
        step = step_of(with_rollout_logprobs(SAMPLES, actor), prompts=prompts, micro=micro, epochs=2)
        step.run(PolicyTrainer(actor, algorithm_of(loss_mode), reference=Table(seed=1)))
        assert len(actor.seen) == 2 * 2 // prompts
        tables.append(actor.table.detach())
    assert not torch.equal(tables[0], Table().table)
    for table in tables[1:]:
        torch.testing.assert_close(table, tables[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prompts", [1, 2])
def test_kl_cov_penalizes_the_tokens_with_the_largest_current_covariance(prompts: int) -> None:
    actor = Table(lr=0.5)
    step = step_of(with_rollout_logprobs(SAMPLES, actor), prompts=prompts)
    metrics = step.run(PolicyTrainer(actor, algorithm_of("kl_cov")))
    for batch, table in zip(actor.seen, actor.before, strict=True):
        mask, now = batch.mask, actor.lookup_logprobs(batch, table)
        advantages, logprobs = batch.advantages[mask], now[mask]
        covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
        count = max(1, int(0.3 * int(mask.sum())))
        assert int(batch.selected.sum()) == count
        chosen = batch.selected[mask]
        assert covariance[chosen].min() > covariance[~chosen].max()
    counts = [int(batch.selected.sum()) / int(batch.mask.sum()) for batch in actor.seen]
    assert metrics["actor/chosen_tokens"] == pytest.approx(np.mean(counts))


@pytest.mark.parametrize("prompts", [1, 2])
def test_clip_cov_removes_the_gradient_of_a_share_of_all_tokens(prompts: int) -> None:
    samples = [
        sample(g, "".join(chr(97 + (g * 7 + k) % 16) for k in range(3)) + w, float(w < "H"))
        for g in range(40)
        for w in ("EFGJKLM", "HINOPABC")
    ]
    actor = Table()
    step = step_of(with_rollout_logprobs(samples, actor), prompts=20 * prompts)
    metrics = step.run(PolicyTrainer(actor, algorithm_of("clip_cov")))
    shares = [float(batch.selected.sum() / batch.mask.sum()) for batch in actor.seen]
    assert all(0.25 < share < 0.55 for share in shares)  # 0.4 in expectation, of 300 tokens or more
    assert all(not (batch.selected & ~batch.mask).any() for batch in actor.seen)
    assert metrics["actor/chosen_tokens"] == pytest.approx(np.mean(shares))


def preference(actor: Table, sampled: Sequence[Sample]) -> tuple[float, float]:
    """Mean log-prob of the better and of the worse answers, as the table says now."""
    totals = {True: [], False: []}  # type: dict[bool, list[float]]
    for one in sampled:
        totals[one.score > 0.5].append(float(actor.lookup_logprobs(FlatBatch.from_samples([one])).sum()))
    return float(np.mean(totals[True])), float(np.mean(totals[False]))


PAIRS = [
    sample(0, "abCD", 1.0),
    sample(0, "abEF", 0.0),
    sample(0, "abGHI", 1.0),
    sample(0, "abJKL", 0.0),
    sample(1, "bcMN", 1.0),
    sample(1, "bcOPA", 0.0),
    sample(1, "bcBC", 0.0),  # the third of a group of three has no pair
]


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("loss_mode", ["dpo", "sppo"])
def test_better_answers_become_likelier_and_worse_ones_less(loss_mode: str, prompts: int) -> None:
    actor = Table(lr=0.02)
    policy, step = (
        PolicyTrainer(actor, algorithm_of(loss_mode), reference=Table()),
        step_of(PAIRS[:-1], prompts=prompts),
    )
    start = preference(actor, PAIRS[:-1])
    results = [step.run(policy) for _ in range(3)]
    end = preference(actor, PAIRS[:-1])
    assert end[0] > start[0] + 0.05
    assert end[1] < start[1] - 0.05
    if loss_mode == "dpo":
        assert results[-1]["actor/dpo_loss"] < results[0]["actor/dpo_loss"]
        assert results[-1]["actor/dpo_accuracy"] == 1.0
        assert results[-1]["actor/dpo_margin"] > 0
        assert results[-1]["actor/dpo_pairs"] == pytest.approx(3 * prompts / 2)


def test_the_gradient_of_dpo_is_that_of_its_formula() -> None:
    actor, reference = Table(), Table(seed=1)
    step = step_of(PAIRS[:2] + PAIRS[4:6], micro=1)
    metrics = step.run(
        PolicyTrainer(actor, algorithm_of("dpo", loss_options=LossOptions(dpo_beta=0.3)), reference=reference)
    )
    table = actor.before[0].requires_grad_()
    losses = []
    for better, worse in (PAIRS[:2], PAIRS[4:6]):
        gains = []
        for one in (better, worse):
            batch = FlatBatch.from_samples([one])
            gains.append((actor.lookup_logprobs(batch, table) - reference.lookup_logprobs(batch)).sum())
        losses.append(-logsigmoid(0.3 * (gains[0] - gains[1])))
    loss = torch.stack(losses).mean()
    loss.backward()
    assert metrics["actor/dpo_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(float(table.grad.norm()), rel=1e-4)


def test_a_response_without_a_pair_is_not_trained() -> None:
    actor, step = Table(), step_of(PAIRS)
    step.run(PolicyTrainer(actor, algorithm_of("dpo"), reference=Table()))
    batch = actor.seen[0]
    trained = by_token(batch, batch.advantages)
    assert sum(not numbers for numbers in trained.values()) == 1
    assert trained[tuple(PAIRS[4].tokens)]


def test_dpo_skips_groups_with_equal_scores_and_reports_no_pairs() -> None:
    actor, step = Table(), step_of([replace(one, score=1.0) for one in PAIRS])
    metrics = step.run(PolicyTrainer(actor, algorithm_of("dpo"), reference=Table(seed=1)))
    assert torch.equal(actor.table, actor.before[0])
    assert metrics["actor/skipped_steps"] == 1
    assert metrics["actor/dpo_loss"] == 0.0


# Self-play


def test_the_reference_becomes_the_policy_every_so_many_steps_and_is_in_the_checkpoint(tmp_path: Any) -> None:
    def policy() -> PolicyTrainer:
        return PolicyTrainer(Table(), algorithm_of("dpo", ref_update_freq=2), reference=Table(trainable=False))

    step, whole, parts = step_of(PAIRS), policy(), policy()
    for number in range(1, 6):
        if number == 4:
            parts = resumed(policy(), parts, tmp_path)
        assert step.run(whole) == step.run(parts)
        assert torch.equal(whole.actor.table, whole.reference.table) == (number % 2 == 0)  # type: ignore[union-attr, attr-defined]
        assert torch.equal(parts.reference.table, whole.reference.table)  # type: ignore[union-attr]


def test_a_reference_can_be_a_moving_average_of_the_policy() -> None:
    step = step_of(PAIRS)
    policy = PolicyTrainer(
        Table(), algorithm_of("dpo", ref_update_freq=1, ref_update_ratio=0.25), reference=Table(trainable=False)
    )
    start = Table().table.detach().clone()
    step.run(policy)
    expected = start + 0.25 * (policy.actor.table - start)  # type: ignore[attr-defined]
    torch.testing.assert_close(policy.reference.table, expected)  # type: ignore[union-attr]


def test_truncated_responses_count_in_the_baseline_but_are_not_trained() -> None:
    cut = [replace(SAMPLES[0], finish_reason="length"), *SAMPLES[1:]]
    step = step_of(cut)
    policies = [PolicyTrainer(Table(), AlgorithmSettings(mask_truncated=flag)) for flag in (False, True)]
    for policy in policies:
        policy.prepare(step.samples, step.plan)
    plain, masked = (policy._batch for policy in policies)
    assert torch.equal(plain.advantages, masked.advantages)  # type: ignore[arg-type]
    dropped = plain.mask & ~masked.mask
    indices = [i for i, sample in enumerate(step.samples) if sample.finish_reason == "length"]
    assert dropped.any()
    assert set(plain.segment_ids[dropped].tolist()) == set(indices)
    assert not masked.mask[torch.isin(masked.segment_ids, torch.tensor(indices))].any()


def test_a_reference_that_stays_is_not_in_the_checkpoint() -> None:
    policy = PolicyTrainer(Table(), algorithm_of("dpo"), reference=Table(trainable=False))
    step_of(PAIRS).run(policy)
    assert set(policy.states()) == {"actor"}
    assert torch.equal(policy.reference.table, Table().table)  # type: ignore[union-attr]


# Process rewards


def prime_policy(**changes: Any) -> PolicyTrainer:
    process = PrimeRewardModel(Table(role="process", **changes), Table(trainable=False), beta=0.5)
    return PolicyTrainer(Table(), AlgorithmSettings("prime"), prime=process)


def test_the_process_model_learns_to_tell_right_answers_from_wrong_ones() -> None:
    step, policy = step_of(PAIRS, prompts=1), prime_policy(lr=0.05)
    results = [step.run(policy) for _ in range(12)]
    assert results[0]["process/accuracy"] < 0.7
    assert results[-1]["process/accuracy"] == 1.0
    assert results[-1]["process/loss"] < 0.5 * results[0]["process/loss"]
    assert {"process/grad_norm", "process/lr", "process/skipped_steps"} <= results[0].keys()


def test_the_process_rewards_are_the_log_ratio_of_the_model_just_trained_to_where_it_started() -> None:
    step, policy = step_of(PAIRS), prime_policy(lr=0.05)
    shown: list[Tensor | None] = []
    estimator = policy._estimator
    policy._estimator = lambda x: (shown.append(x.process), estimator(x))[1]  # type: ignore[func-returns-value]
    step.run(policy)
    batch, model = FlatBatch.from_samples(step.samples), policy.prime.model  # type: ignore[union-attr]
    expected = 0.5 * (model.lookup_logprobs(batch) - Table().lookup_logprobs(batch)).double()  # type: ignore[attr-defined]
    assert expected.any()
    torch.testing.assert_close(shown[0], expected, atol=1e-6, rtol=1e-4)


def test_the_process_model_is_in_the_checkpoint(tmp_path: Any) -> None:
    step, saved = step_of(PAIRS), prime_policy()
    step.run(saved)
    assert set(saved.states()) == {"actor", "process"}
    parts = resumed(prime_policy(), saved, tmp_path)
    assert [step.run(parts) for _ in range(2)] == [step.run(saved) for _ in range(2)]
    assert torch.equal(parts.prime.model.table, saved.prime.model.table)  # type: ignore[union-attr, attr-defined]
