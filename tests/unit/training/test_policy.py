"""A step of a rank: from samples to rewards, advantages and weights, and from there to the update of each model."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.fake_train_engine import FakeSettings, FakeTrainEngine, concat
from verl.algorithms.advantages import ESTIMATORS, AdvantageInputs
from verl.algorithms.aggregate import segment_sum
from verl.algorithms.losses import LOSSES
from verl.algorithms.settings import (
    AlgorithmSettings,
    Correction,
    Distillation,
    EstimatorOptions,
    KlController,
    LossOptions,
)
from verl.checkpoint.save import load, save
from verl.data.flat_batch import FlatBatch
from verl.data.plan import Planner, RankPlan, UpdateSizes
from verl.errors import ConfigError
from verl.training.policy import PolicyTrainer, PrimeRewardModel
from verl.training.settings import Schedule
from verl.training.teacher import TeacherEngine
from verl.types import Sample, SampleHandle

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]

VOCABULARY = 16


class Table(FakeTrainEngine):
    """A table that remembers the mini-batches it was updated on, each as one batch, and what it was before."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(FakeSettings(VOCABULARY, **settings))
        self.optimizer.param_groups[0]["eps"] = 1e-3  # else AdamW makes whole steps of gradients that are rounding
        self.seen: list[FlatBatch] = []
        self.before: list[Tensor] = []

    def update(self, micro_batches: Sequence[FlatBatch], loss: Any, **others: Any) -> dict[str, float]:
        self.seen.append(concat(micro_batches))
        self.before.append(self.table.detach().clone())
        return super().update(micro_batches, loss, **others)

    def lookup_logprobs(self, batch: FlatBatch, table: Tensor | None = None) -> Tensor:
        """Log-probs [T] of generated tokens, straight from the table."""
        table = self.table.detach() if table is None else table
        indices = batch.mask.nonzero().squeeze(-1)
        logprobs = table.log_softmax(-1)[batch.tokens[indices - 1], batch.tokens[indices]]
        return torch.zeros(batch.num_tokens).index_copy(0, indices, logprobs)


def critic(table: Tensor | None = None) -> Table:
    engine = Table(head="value", role="critic")
    if table is not None:
        engine.table.data.copy_(table)
    return engine


def sample(group: int, tokens: str, score: float, **fields: Any) -> Sample:
    """`tokens` as a word: the model wrote what is in capitals; a letter is its place in the alphabet."""
    ids = np.array([ord(letter.lower()) - ord("a") for letter in tokens], np.int32)
    mask = np.array([letter.isupper() for letter in tokens])
    return Sample(
        group, ids, mask, np.zeros(len(ids), np.float32), np.where(mask, 0, -1).astype(np.int32), score, **fields
    )


SAMPLES = [
    sample(0, "abCDeFg", 1.0),  # a tool spoke in between, and had the last word
    sample(0, "abDD", 0.0),
    sample(0, "abcd", 0.25),  # nothing generated
    sample(1, "kIJ", 0.0),
    sample(1, "kLMNO", 2.0),
    sample(1, "kL", 1.0),
]
GENERATED = 3 + 2 + 0 + 2 + 4 + 1


@dataclass(frozen=True)
class Step:
    """Samples and what the planner says of them, in the order of the rank."""

    samples: list[Sample]
    plan: RankPlan

    def run(self, policy: PolicyTrainer) -> dict[str, float]:
        return policy.prepare(self.samples, self.plan) | policy.update(self.plan)


def step_of(samples: Sequence[Sample], *, prompts: int = 9, micro: int = 9, epochs: int = 1, **sizes: Any) -> Step:
    """One rank's step; `prompts` of a mini-batch, `micro` samples of a micro-batch."""
    numbers: dict[int, int] = {}
    handles = []
    for index, one in enumerate(samples):
        number = numbers[one.group] = numbers.get(one.group, -1) + 1
        length, generated = len(one.tokens), int(one.mask.sum())
        handles.append(
            SampleHandle(index, one.group, length, generated, one.score, 0, baseline=one.baseline, index=number)
        )
    planner = Planner(1, UpdateSizes(prompts, micro, None, epochs), **sizes)
    plan = planner.plan(handles).ranks[0]
    return Step([samples[index] for index in plan.refs], plan)


def with_rollout_logprobs(
    samples: Sequence[Sample], engine: Table, gap: float | dict[int, float] = 0.0
) -> list[Sample]:
    """The same samples, drawn by an engine whose log-probs are those of the table less a gap, of all or by place."""
    gaps = gap if isinstance(gap, dict) else dict.fromkeys(range(len(samples)), gap)
    logprobs = [engine.lookup_logprobs(FlatBatch.from_samples([one])).numpy() for one in samples]
    return [
        replace(one, logprobs=np.where(one.mask, known - gaps.get(index, 0.0), 0).astype(np.float32))
        for index, (one, known) in enumerate(zip(samples, logprobs, strict=True))
    ]


@pytest.fixture
def episodes(monkeypatch: pytest.MonkeyPatch) -> list[AdvantageInputs]:
    """What an estimator of the name `seen` was shown."""
    shown: list[AdvantageInputs] = []

    def seen(x: AdvantageInputs) -> Tensor:
        shown.append(x)
        return x.per_token(x.scores)

    monkeypatch.setitem(ESTIMATORS, "seen", seen)
    return shown


def by_token(batch: FlatBatch, values: Tensor) -> dict[tuple[int, ...], list[float]]:
    """Values of the generated tokens of each sequence, under the tokens of that sequence: whatever the order."""
    results = {}
    for b in range(len(batch)):
        part = slice(int(batch.offsets[b]), int(batch.offsets[b + 1]))
        results[tuple(batch.tokens[part].tolist())] = values[part][batch.mask[part]].tolist()
    return results


def resumed(fresh: PolicyTrainer, saved: PolicyTrainer, tmp_path: Any) -> PolicyTrainer:
    """A new policy that takes over what another one saved, by way of files."""
    for folder, state in saved.states().items():
        save(state, tmp_path / folder)
    fresh.load_states({folder: load(state, tmp_path / folder) for folder, state in fresh.states().items()})
    return fresh


# Rewards


def test_a_score_lands_on_the_last_token_that_the_model_wrote(episodes: list[AdvantageInputs]) -> None:
    step = step_of(SAMPLES)
    PolicyTrainer(Table(), AlgorithmSettings("seen")).prepare(step.samples, step.plan)
    (x,) = episodes
    assert x.scores.tolist() == [one.score for one in step.samples]
    batch = FlatBatch.from_samples(step.samples).with_(mask=torch.ones_like(x.mask))
    rewards = by_token(batch, x.rewards)
    expected = {
        "abCDeFg": [0, 0, 0, 0, 0, 1.0, 0],
        "abDD": [0, 0, 0, 0],
        "abcd": [0, 0, 0, 0],
        "kLMNO": [0, 0, 0, 0, 2.0],
    }
    for word, numbers in expected.items():
        assert rewards[tuple(sample(0, word, 0).tokens)] == numbers


@pytest.mark.parametrize(
    ("kind", "estimate"), [("kl", lambda x: -x), ("mse", lambda x: x**2 / 2), ("low_var_kl", lambda x: x.exp() - x - 1)]
)
def test_kl_in_the_reward_is_taken_off_every_generated_token(
    episodes: list[AdvantageInputs], kind: str, estimate: Any
) -> None:
    actor, reference, step = Table(), Table(seed=1), step_of(SAMPLES)
    algorithm = AlgorithmSettings("seen", reward_kl=KlController(0.5), reward_kl_type=kind)
    metrics = PolicyTrainer(actor, algorithm, reference=reference).prepare(step.samples, step.plan)
    plain = step_of(SAMPLES)
    PolicyTrainer(actor, AlgorithmSettings("seen")).prepare(plain.samples, plain.plan)
    with_kl, without = episodes
    batch = FlatBatch.from_samples(step.samples)
    kl = estimate(reference.lookup_logprobs(batch) - actor.lookup_logprobs(batch)).double() * batch.mask
    torch.testing.assert_close(with_kl.rewards, without.rewards - 0.5 * kl, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        with_kl.scores, without.scores - 0.5 * segment_sum(kl, batch.offsets), atol=1e-6, rtol=1e-5
    )
    torch.testing.assert_close(segment_sum(with_kl.rewards, batch.offsets)[batch.lengths > 0][:1], with_kl.scores[:1])
    assert metrics["actor/reward_kl"] == pytest.approx(float(kl.sum()) / GENERATED, rel=1e-5)
    assert metrics["actor/reward_kl_coef"] == 0.5


def exact_kl(actor: Table, reference: Table, batch: FlatBatch) -> Tensor:
    """Of the state that each generated token was drawn from, by hand."""
    log_p, other_log_p = (engine.table.detach().log_softmax(-1) for engine in (actor, reference))
    indices = batch.mask.nonzero().squeeze(-1)
    rows = (log_p.exp() * (log_p - other_log_p)).sum(-1)
    return torch.zeros(batch.num_tokens).index_copy(0, indices, rows[batch.tokens[indices - 1]])


def test_the_exact_kl_in_the_reward_is_that_of_the_two_tables(episodes: list[AdvantageInputs]) -> None:
    actor, reference, step = Table(), Table(seed=1), step_of(SAMPLES, micro=2)
    algorithm = AlgorithmSettings("seen", reward_kl=KlController(0.5), reward_kl_type="full")
    metrics = PolicyTrainer(actor, algorithm, reference=reference).prepare(step.samples, step.plan)
    kl = exact_kl(actor, reference, FlatBatch.from_samples(step.samples))
    assert metrics["actor/reward_kl"] == pytest.approx(float(kl.sum()) / GENERATED, rel=1e-5)
    PolicyTrainer(actor, AlgorithmSettings("seen")).prepare(step.samples, step.plan)
    torch.testing.assert_close(episodes[0].rewards, episodes[1].rewards - 0.5 * kl.double(), atol=1e-6, rtol=1e-5)


def test_the_exact_kl_in_the_loss_is_that_of_the_two_tables_and_falls() -> None:
    actor, reference, step = Table(lr=0.3), Table(seed=1), step_of(SAMPLES, micro=2)
    policy = PolicyTrainer(actor, AlgorithmSettings(loss_kl_coef=50.0, loss_kl_type="full"), reference=reference)
    kl = exact_kl(actor, reference, FlatBatch.from_samples(step.samples))
    results = [step.run(policy)["actor/kl_loss"] for _ in range(6)]
    assert results[0] == pytest.approx(float(kl.sum()) / GENERATED, rel=1e-5)
    assert results[-1] < results[0] / 2


def test_an_adaptive_weight_of_the_kl_moves_and_is_in_the_checkpoint(tmp_path: Any) -> None:
    def policy(beta: float) -> PolicyTrainer:
        controller = KlController(beta, adaptive=True, target=1e-3, horizon=20)
        return PolicyTrainer(Table(), AlgorithmSettings(reward_kl=controller), reference=Table(seed=1))

    step, first = step_of(SAMPLES), policy(0.5)
    assert step.run(first)["actor/reward_kl_coef"] == 0.5
    moved = 0.5 * (1 + 0.2 * len(SAMPLES) / 20)  # the KL is far above its target: the error is cut off at 0.2
    second = resumed(policy(0.1), first, tmp_path)
    assert step.run(first)["actor/reward_kl_coef"] == pytest.approx(moved)
    assert step.run(second)["actor/reward_kl_coef"] == pytest.approx(moved)
    assert torch.equal(first.actor.table, second.actor.table)  # type: ignore[attr-defined]


@pytest.mark.parametrize("before", [None, KlController(0.5)])
def test_a_weight_of_the_kl_that_does_not_steer_itself_is_that_of_the_settings(
    before: KlController | None, tmp_path: Any
) -> None:
    def policy(controller: KlController | None) -> PolicyTrainer:
        return PolicyTrainer(Table(), AlgorithmSettings(reward_kl=controller), reference=Table(seed=1))

    step = step_of(SAMPLES)
    assert step.run(resumed(policy(KlController(0.1)), policy(before), tmp_path))["actor/reward_kl_coef"] == 0.1


@pytest.mark.parametrize("contents", [("model",), ("optimizer",), ("extra",), ("model", "extra"), ()])
def test_a_checkpoint_holds_and_gives_back_what_is_asked_for(contents: tuple[str, ...], tmp_path: Any) -> None:
    step, saved, fresh = step_of(SAMPLES), PolicyTrainer(Table()), PolicyTrainer(Table(seed=3))
    step.run(saved)
    chosen = {"actor": contents}
    for folder, state in saved.states(chosen).items():
        save(state, tmp_path / folder)
    before = fresh.actor.table.detach().clone()  # type: ignore[attr-defined]
    wanted = fresh.states(chosen)
    fresh.load_states({folder: load(state, tmp_path / folder) for folder, state in wanted.items()})
    source = saved.actor.table if "model" in contents else before  # type: ignore[attr-defined]
    assert torch.equal(fresh.actor.table, source)  # type: ignore[attr-defined]
    moments = fresh.actor.optimizer.state.get(fresh.actor.table)  # type: ignore[attr-defined]
    assert bool(moments) == ("optimizer" in contents)
    assert fresh.actor.step == (1 if "extra" in contents else 0)  # type: ignore[attr-defined]


def test_a_fixed_weight_of_the_kl_stays() -> None:
    step, policy = (
        step_of(SAMPLES),
        PolicyTrainer(Table(), AlgorithmSettings(reward_kl=KlController(0.5)), reference=Table(seed=1)),
    )
    assert {step.run(policy)["actor/reward_kl_coef"] for _ in range(3)} == {0.5}


# Critic


def gae_by_hand(values: list[float], rewards: list[float], gamma: float, lam: float) -> list[float]:
    advantages, next_value, next_advantage = [], 0.0, 0.0
    for value, reward in zip(reversed(values), reversed(rewards), strict=True):
        next_advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        next_value = value
        advantages.append(next_advantage)
    return advantages[::-1]


CRITIC_SIZES = {"critic": UpdateSizes(9, 9, None)}


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


def test_the_critic_comes_to_know_the_returns() -> None:
    step = step_of(SAMPLES, critic=UpdateSizes(1, 1, None, epochs=2))
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


def test_remax_takes_the_score_of_the_greedy_answer_off() -> None:
    samples = [replace(one, baseline=0.5 if one.group == 0 else -1.0) for one in SAMPLES]
    actor, step = Table(), step_of(samples)
    step.run(PolicyTrainer(actor, AlgorithmSettings("remax")))
    advantages = by_token(actor.seen[0], actor.seen[0].advantages)
    for one in samples:
        assert advantages[tuple(one.tokens)] == [one.score - one.baseline] * int(one.mask.sum())


def test_remax_without_greedy_answers_says_what_is_missing() -> None:
    samples = [replace(one, baseline=0.5 if one.group == 0 else None) for one in SAMPLES]
    step = step_of(samples)
    with pytest.raises(ValueError, match="no greedy baseline; run a greedy episode"):
        step.run(PolicyTrainer(Table(), AlgorithmSettings("remax")))


# The engine that generated


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
        PolicyTrainer(actor, AlgorithmSettings(correction=Correction("sequence", normalize=True, reject="sequence")))
    )
    step.run(PolicyTrainer(plain))
    torch.testing.assert_close(actor.table, plain.table, atol=1e-5, rtol=1e-5)


REJECTING = Correction(reject="sequence", upper=2.0, lower=0.5)


def test_what_is_rejected_is_left_out_for_the_policy_and_still_counts_for_baselines() -> None:
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
    metrics = step.run(PolicyTrainer(actor, AlgorithmSettings(correction=Correction(reject="token"))))
    assert torch.equal(actor.table, start)
    assert metrics["actor/skipped_steps"] == 2
    assert metrics["training/rollout_rejected"] == 1.0


# Losses


def algorithm_of(loss_mode: str, **changes: Any) -> AlgorithmSettings:
    options = LossOptions(clip_cov_lb=-9.0, clip_cov_ub=9.0, clip_cov_ratio=0.4, kl_cov_ratio=0.3)
    estimator = "win_rate" if loss_mode == "sppo" else "grpo"
    return replace(AlgorithmSettings(estimator, loss_mode=loss_mode, loss_options=options), **changes)


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
def test_kl_cov_holds_the_tokens_that_have_the_largest_covariance_now(prompts: int) -> None:
    actor = Table(lr=0.5)
    step = step_of(with_rollout_logprobs(SAMPLES, actor), prompts=prompts)
    metrics = step.run(PolicyTrainer(actor, algorithm_of("kl_cov")))
    for batch, table in zip(actor.seen, actor.before, strict=True):
        mask, now = batch.mask, actor.lookup_logprobs(batch, table)
        advantages, logprobs = batch.advantages[mask], now[mask]
        covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
        count = max(1, int(0.3 * int(mask.sum())))
        assert int(batch.chosen.sum()) == count
        chosen = batch.chosen[mask]
        assert covariance[chosen].min() > covariance[~chosen].max()
    counts = [int(batch.chosen.sum()) / int(batch.mask.sum()) for batch in actor.seen]
    assert metrics["actor/chosen_tokens"] == pytest.approx(np.mean(counts))


@pytest.mark.parametrize("prompts", [1, 2])
def test_clip_cov_takes_the_gradient_of_a_share_of_all_tokens(prompts: int) -> None:
    samples = [
        sample(g, "".join(chr(97 + (g * 7 + k) % 16) for k in range(3)) + w, float(w < "H"))
        for g in range(40)
        for w in ("EFGJKLM", "HINOPABC")
    ]
    actor = Table()
    step = step_of(with_rollout_logprobs(samples, actor), prompts=20 * prompts)
    metrics = step.run(PolicyTrainer(actor, algorithm_of("clip_cov")))
    shares = [float(batch.chosen.sum() / batch.mask.sum()) for batch in actor.seen]
    assert all(0.25 < share < 0.55 for share in shares)  # 0.4 in expectation, of 300 tokens or more
    assert all(not (batch.chosen & ~batch.mask).any() for batch in actor.seen)
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


def test_an_answer_without_a_pair_is_left_alone() -> None:
    actor, step = Table(), step_of(PAIRS)
    step.run(PolicyTrainer(actor, algorithm_of("dpo"), reference=Table()))
    batch = actor.seen[0]
    trained = by_token(batch, batch.advantages)
    assert sum(not numbers for numbers in trained.values()) == 1
    assert trained[tuple(PAIRS[4].tokens)]


def test_dpo_on_groups_without_a_difference_moves_nothing_and_says_so() -> None:
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


# The user's own functions


@pytest.fixture
def custom_functions(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_of_this_test.py").write_text(
        "import torch\n"
        "from verl.algorithms.losses import PolicyLoss\n"
        "NUMBER = 3\n"
        "def doubled(x):\n"
        "    return x.per_token(2 * x.scores)\n"
        "def with_returns(x):\n"
        "    return x.per_token(x.scores), x.per_token(x.scores + 1)\n"
        "def plain(x, options):\n"
        "    return -x.advantages * x.logprobs\n"
        "def clipped(x, options):\n"
        "    return PolicyLoss(-x.advantages * x.logprobs, clipped_high=x.mask)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("custom_functions")
def test_an_estimator_of_the_user() -> None:
    actor, step = Table(), step_of(SAMPLES)
    step.run(PolicyTrainer(actor, AlgorithmSettings("mine_of_this_test:doubled")))
    advantages = by_token(actor.seen[0], actor.seen[0].advantages)
    for one in SAMPLES:
        assert advantages[tuple(one.tokens)] == [2 * one.score] * int(one.mask.sum())


@pytest.mark.usefixtures("custom_functions")
def test_an_estimator_of_the_user_that_gives_returns_trains_a_critic() -> None:
    valuer, step = critic(), step_of(SAMPLES, **CRITIC_SIZES)
    metrics = step.run(PolicyTrainer(Table(), AlgorithmSettings("mine_of_this_test:with_returns"), critic=valuer))
    returns = by_token(valuer.seen[0], valuer.seen[0].returns)
    for one in SAMPLES:
        assert returns[tuple(one.tokens)] == [one.score + 1] * int(one.mask.sum())
    assert "critic/explained_variance" in metrics


@pytest.mark.usefixtures("custom_functions")
def test_a_critic_beside_an_estimator_that_gives_no_returns_is_refused_with_a_fix() -> None:
    step = step_of(SAMPLES, **CRITIC_SIZES)
    with pytest.raises(ConfigError, match=r"doubled returned advantages but no returns .* critic.enable=false"):
        step.run(PolicyTrainer(Table(), AlgorithmSettings("mine_of_this_test:doubled"), critic=critic()))


@pytest.mark.usefixtures("custom_functions")
@pytest.mark.parametrize("name", ["plain", "clipped"])
def test_a_loss_of_the_user_trains_like_the_shipped_one_of_the_same_formula(name: str) -> None:
    custom, shipped, step = Table(), Table(), step_of(SAMPLES, prompts=1)
    metrics = step.run(PolicyTrainer(custom, AlgorithmSettings(loss_mode=f"mine_of_this_test:{name}")))
    step.run(PolicyTrainer(shipped, AlgorithmSettings(loss_mode="gpg")))
    assert torch.equal(custom.table, shipped.table)
    assert metrics["actor/pg_clipfrac_upper"] == (1.0 if name == "clipped" else 0.0)


@pytest.mark.usefixtures("custom_functions")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grop", "'grop' is not one of .*, nor package.module:function"),
        ("nowhere_at_all:f", "'nowhere_at_all:f' cannot be imported: No module named 'nowhere_at_all'.*PYTHONPATH"),
        ("mine_of_this_test:absent", "'mine_of_this_test:absent' cannot be imported: .*'absent'"),
        ("mine_of_this_test:NUMBER", "'mine_of_this_test:NUMBER' is int, it must be a function"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_before_the_first_step(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.adv_estimator: {message}"):
        PolicyTrainer(Table(), AlgorithmSettings(name))
    with pytest.raises(ConfigError, match=f"actor_rollout_ref.actor.policy_loss.loss_mode: {message}"):
        PolicyTrainer(Table(), AlgorithmSettings(loss_mode=name))


# All together


def test_a_rank_without_samples_prepares_and_updates_nothing() -> None:
    handles = [SampleHandle("only", 0, 4, 2, 1.0, 0)]
    planner = Planner(2, UpdateSizes(1, 1, None), critic=UpdateSizes(1, 1, None))
    empty = next(plan for plan in planner.plan(handles).ranks if not len(plan))
    for loss_mode in LOSSES:
        actor = Table()
        step = Step([], empty)
        algorithm = algorithm_of(loss_mode, estimator="gae", reward_kl=KlController(0.1), correction=REJECTING)
        step.run(PolicyTrainer(actor, algorithm, reference=Table(), critic=critic()))
        assert torch.equal(actor.table, actor.before[0])


def test_what_was_prepared_is_forgotten_after_the_update() -> None:
    policy, step = PolicyTrainer(Table()), step_of(SAMPLES)
    policy.prepare(step.samples, step.plan)
    states = copy.deepcopy(policy.states())
    policy.update(step.plan)
    assert len(policy._batch) == 0
    assert not torch.equal(states["actor"]["model"]["table"], policy.states()["actor"]["model"]["table"])


def test_the_learning_rate_moves_once_per_step_whatever_the_number_of_updates() -> None:
    actor, step = Table(), step_of(SAMPLES, prompts=1)
    actor.schedule = Schedule(1.0, warmup_steps=4)
    policy = PolicyTrainer(actor)
    assert len(step.plan.policy) == 2
    assert [step.run(policy)["actor/lr"] for _ in range(3)] == [0.25, 0.5, 0.75]


def test_metrics_are_means_over_updates_and_the_learning_rate_is_the_last() -> None:
    actor, step = Table(), step_of(SAMPLES, prompts=1)
    rates = iter([0.1, 0.2])
    actor.schedule = type("Rising", (), {"at": staticmethod(lambda step: next(rates))})()  # type: ignore[assignment]
    metrics = step.run(PolicyTrainer(actor))
    assert metrics["actor/lr"] == 0.2
    assert metrics["actor/skipped_steps"] == 0


def test_an_estimator_sees_the_components_of_the_reward(episodes: list[AdvantageInputs]) -> None:
    step = step_of(SAMPLES, components=["score"])
    step.run(PolicyTrainer(Table(), AlgorithmSettings("seen")))
    [seen] = episodes
    assert list(seen.components) == ["score"]
    assert seen.components["score"].tolist() == seen.scores.tolist()


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
def test_the_policy_comes_to_the_teacher(mode: str) -> None:
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
        return PolicyTrainer(Table(), algorithm, teacher=TeacherEngine(Table(seed=1)))  # type: ignore[arg-type]

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
    policy = PolicyTrainer(actor, algorithm, teacher=TeacherEngine(teacher))  # type: ignore[arg-type]
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
def test_the_exact_kl_to_a_teacher_with_its_own_prompts_leaves_out_what_the_policy_leaves_out(micro: int) -> None:
    actor, teacher, step = Table(), Table(seed=1), step_of(TAUGHT, micro=micro)
    algorithm = AlgorithmSettings("no_rewards", mask_truncated=True, distillation=Distillation("loss"))
    start = actor.table.detach().clone().requires_grad_()
    kept = [one for one in step.samples if one.finish_reason != "length"]
    batch, view = FlatBatch.from_samples(kept), as_taught(kept)
    log_p = start.log_softmax(-1)[batch.tokens[batch.mask.nonzero().squeeze(-1) - 1]]
    log_q = teacher.table.detach().log_softmax(-1)[view.tokens[view.mask.nonzero().squeeze(-1) - 1]]
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    kl.backward()
    policy = PolicyTrainer(actor, algorithm, teacher=TeacherEngine(teacher))  # type: ignore[arg-type]
    metrics = step.run(policy)
    assert metrics["actor/distillation_kl"] == pytest.approx(float(kl.detach()), rel=1e-5)
    assert start.grad is not None
    assert metrics["actor/grad_norm"] == pytest.approx(float(start.grad.norm()), rel=1e-5)
