"""A step with a teacher: in the advantages or in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.policy_steps import GENERATED, SAMPLES, Table, exact_kl, resumed, sample, step_of
from verl.algorithms.settings import (
    AlgorithmSettings,
    Distillation,
)
from verl.data.flat_batch import FlatBatch
from verl.training.policy.trainer import PolicyTrainer
from verl.types import Sample

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]


def test_a_teacher_in_the_advantages_judges_each_token_alone() -> None:
    actor, teacher, step = Table(), Table(seed=1), step_of(SAMPLES, micro=2)
    algorithm = AlgorithmSettings("no_rewards", distillation=Distillation(coef=0.5))
    metrics = step.run(PolicyTrainer(actor, algorithm, teacher=teacher))
    [batch] = actor.seen
    gap = torch.where(
        batch.mask, actor.lookup_logprobs(batch, actor.before[0]) - teacher.lookup_logprobs(batch), torch.zeros(())
    )
    torch.testing.assert_close(batch.advantages, -0.5 * gap, atol=1e-6, rtol=1e-5)
    assert metrics["actor/distillation_kl"] == pytest.approx(float(gap.sum()) / GENERATED, rel=1e-5)


def test_clamps_bound_what_the_teacher_says_of_a_token() -> None:
    actor, teacher, step = Table(), Table(seed=1), step_of(SAMPLES, micro=2)
    distillation = Distillation(coef=0.5, log_prob_min_clamp=-3.0, loss_max_clamp=1.0)
    metrics = step.run(
        PolicyTrainer(actor, AlgorithmSettings("no_rewards", distillation=distillation), teacher=teacher)
    )
    [batch] = actor.seen
    old, taught = actor.lookup_logprobs(batch, actor.before[0]), teacher.lookup_logprobs(batch)
    gap = torch.where(batch.mask, old.clamp(min=-3.0) - taught.clamp(min=-3.0), torch.zeros(()))
    torch.testing.assert_close(batch.advantages, -0.5 * gap.clamp(-1.0, 1.0), atol=1e-6, rtol=1e-5)
    count = int((gap.abs() > 1.0).sum())
    assert 0 < count < GENERATED
    assert (old - taught)[batch.mask].abs().max() > gap.abs().max() > 1.0, "both clamps are seen"
    assert metrics["actor/distillation_kl"] == pytest.approx(float(gap.sum()) / GENERATED, rel=1e-5)
    assert metrics["actor/distillation_clipfrac"] == pytest.approx(count / GENERATED)


@pytest.mark.parametrize("micro", [2, 9])
def test_a_clamped_exact_kl_has_a_gradient_only_below_the_limit(micro: int) -> None:
    actor, teacher, step = Table(), Table(seed=1), step_of(SAMPLES, micro=micro)
    batch = FlatBatch.from_samples(step.samples)
    start = actor.table.detach().clone().requires_grad_()
    previous = batch.tokens[batch.mask.nonzero().squeeze(-1) - 1]
    log_p, log_q = start.log_softmax(-1)[previous], teacher.table.detach().log_softmax(-1)[previous]
    kl = (log_p.exp() * (log_p.clamp(min=-3.0) - log_q.clamp(min=-3.0)).detach()).sum(-1)
    limit = float(kl.detach().sort().values[len(kl) // 2]) + 1e-4
    (0.5 * kl.clamp(max=limit).mean()).backward()
    assert start.grad is not None
    distillation = Distillation("loss", 0.5, log_prob_min_clamp=-3.0, loss_max_clamp=limit)
    metrics = step.run(
        PolicyTrainer(actor, AlgorithmSettings("no_rewards", distillation=distillation), teacher=teacher)
    )
    assert metrics["actor/grad_norm"] == pytest.approx(float(start.grad.norm()), rel=1e-5)
    assert metrics["actor/distillation_kl"] == pytest.approx(float(kl.detach().mean()), rel=1e-5)
    is_clamped = kl.detach() > limit
    assert metrics["actor/distillation_clipfrac"] == pytest.approx(float(is_clamped.float().mean()))
    below = set(previous[~is_clamped].tolist())
    untouched = [token for token in previous[is_clamped].tolist() if token not in below]
    assert untouched
    assert torch.equal(actor.table.detach()[untouched], start.detach()[untouched])


def test_a_teacher_adds_to_the_advantages_of_rewards() -> None:
    step, teacher = step_of(SAMPLES), Table(seed=1)
    batches = []
    for estimator, distillation in (("grpo", None), ("no_rewards", Distillation()), ("grpo", Distillation())):
        actor = Table()
        step.run(PolicyTrainer(actor, AlgorithmSettings(estimator, distillation=distillation), teacher=teacher))
        batches += actor.seen
    rewards, taught, both = (batch.advantages for batch in batches)
    torch.testing.assert_close(both, rewards + taught, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", ["reward", "loss"])
def test_the_policy_converges_to_the_teacher(mode: str) -> None:
    actor, teacher, step = Table(lr=0.3), Table(seed=1), step_of(SAMPLES, micro=2)
    policy = PolicyTrainer(actor, AlgorithmSettings("no_rewards", distillation=Distillation(mode)), teacher=teacher)
    results = [abs(step.run(policy)["actor/distillation_kl"]) for _ in range(12)]
    assert results[-1] < results[0] / 2


def test_the_exact_kl_to_the_teacher_is_that_of_the_two_tables_next_to_that_to_the_reference() -> None:
    actor, reference, teacher, step = Table(), Table(seed=1), Table(seed=2), step_of(SAMPLES, micro=2)
    algorithm = AlgorithmSettings(
        "no_rewards", loss_kl_coef=0.1, loss_kl_type="full", distillation=Distillation("loss", 0.5)
    )
    batch = FlatBatch.from_samples(step.samples)
    kls = [float(exact_kl(actor, other, batch).sum()) / GENERATED for other in (reference, teacher)]
    metrics = step.run(PolicyTrainer(actor, algorithm, reference=reference, teacher=teacher))
    assert [metrics["actor/kl_loss"], metrics["actor/distillation_kl"]] == pytest.approx(kls, rel=1e-5)


def test_a_teacher_is_not_in_the_checkpoint() -> None:
    policy = PolicyTrainer(Table(), AlgorithmSettings(distillation=Distillation()), teacher=Table(trainable=False))
    assert set(policy.states()) == {"actor"}


def test_a_resumed_distillation_needs_no_teacher_in_the_checkpoint(tmp_path: Any) -> None:
    def policy() -> PolicyTrainer:
        algorithm = AlgorithmSettings("no_rewards", distillation=Distillation())
        return PolicyTrainer(Table(), algorithm, teacher=Table(seed=1))  # type: ignore[arg-type]

    step, first = step_of(SAMPLES), policy()
    step.run(first)
    second = resumed(policy(), first, tmp_path)
    assert step.run(first) == step.run(second)
    assert torch.equal(first.actor.table, second.actor.table)  # type: ignore[attr-defined]


TAUGHT = [
    replace(one, teacher_prompt=np.array(prompt, np.int32))
    for one, prompt in (
        (sample(0, "abCD", 1.0), [9, 5, 7, 1, 3]),
        (sample(0, "abDDE", 0.0, finish_reason="length"), [9, 5, 7, 1, 3]),
        (sample(1, "klmnIJ", 0.0), [6]),
        (sample(1, "klmnO", 2.0), [6]),
    )
]
"""The teacher's prompts are longer than the policy's, and shorter."""


def as_taught(samples: Sequence[Sample]) -> FlatBatch:
    """The responses after the teacher's prompts, written down without the code that is tested."""
    words = [[*one.teacher_prompt, *one.tokens[one.mask]] for one in samples if one.teacher_prompt is not None]
    prompts = [len(one.teacher_prompt) for one in samples if one.teacher_prompt is not None]
    return FlatBatch(
        tokens=torch.tensor([int(token) for word in words for token in word]),
        offsets=torch.tensor([0, *np.cumsum([len(word) for word in words])]),
        mask=torch.tensor(
            [at >= prompt for word, prompt in zip(words, prompts, strict=True) for at in range(len(word))]
        ),
    )


@pytest.mark.parametrize("micro", [1, 3, 9])
def test_a_teacher_with_its_own_prompts_judges_the_same_tokens(micro: int) -> None:
    actor, teacher, step = Table(), Table(seed=1), step_of(TAUGHT, micro=micro)
    algorithm = AlgorithmSettings("no_rewards", distillation=Distillation())
    policy = PolicyTrainer(actor, algorithm, teacher=teacher)  # type: ignore[arg-type]
    step.run(policy)
    batch, view = FlatBatch.from_samples(step.samples), as_taught(step.samples)
    expected = torch.zeros(batch.num_tokens)
    expected[batch.mask] = (teacher.lookup_logprobs(view))[view.mask]
    [seen] = actor.seen
    order = np.concatenate([micro_batch for parts in step.plan.policy for micro_batch in parts])
    torch.testing.assert_close(seen.teacher_logprobs, batch.with_(advantages=expected).select(order).advantages)
    other = teacher.lookup_logprobs(batch)
    assert not torch.allclose(expected, other), "the teacher would have read the policy's prompt"


@pytest.mark.parametrize("micro", [1, 3, 9])
def test_tokens_dropped_for_the_policy_are_dropped_in_the_exact_kl_to_the_teacher(micro: int) -> None:
    actor, teacher, step = Table(), Table(seed=1), step_of(TAUGHT, micro=micro)
    algorithm = AlgorithmSettings("no_rewards", mask_truncated=True, distillation=Distillation("loss"))
    start = actor.table.detach().clone().requires_grad_()
    kept = [one for one in step.samples if one.finish_reason != "length"]
    batch, view = FlatBatch.from_samples(kept), as_taught(kept)
    log_p = start.log_softmax(-1)[batch.tokens[batch.mask.nonzero().squeeze(-1) - 1]]
    log_q = teacher.table.detach().log_softmax(-1)[view.tokens[view.mask.nonzero().squeeze(-1) - 1]]
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    kl.backward()
    policy = PolicyTrainer(actor, algorithm, teacher=teacher)  # type: ignore[arg-type]
    metrics = step.run(policy)
    assert metrics["actor/distillation_kl"] == pytest.approx(float(kl.detach()), rel=1e-5)
    assert start.grad is not None
    assert metrics["actor/grad_norm"] == pytest.approx(float(start.grad.norm()), rel=1e-5)
