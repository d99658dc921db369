"""A step of a rank: from samples to rewards and advantages, and to the update of each model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.policy_steps import (
    CRITIC_SIZES,
    GENERATED,
    REJECTING,
    SAMPLES,
    Step,
    Table,
    algorithm_of,
    by_token,
    critic,
    exact_kl,
    resumed,
    sample,
    step_of,
    with_rollout_logprobs,
)
from verl.algorithms.advantages import ESTIMATORS, AdvantageInputs
from verl.algorithms.aggregate import segment_sum
from verl.algorithms.losses import LOSSES
from verl.algorithms.settings import (
    AlgorithmSettings,
    Correction,
    KlController,
)
from verl.checkpoint.save import load, save
from verl.config.batch_sizes import BatchSizes
from verl.data.flat_batch import FlatBatch
from verl.data.plan import Planner
from verl.errors import ConfigError
from verl.training.policy.trainer import PolicyTrainer
from verl.training.settings import Schedule
from verl.types import SampleHandle

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]


@pytest.fixture
def episodes(monkeypatch: pytest.MonkeyPatch) -> list[AdvantageInputs]:
    """What an estimator of the name `seen` was shown."""
    shown: list[AdvantageInputs] = []

    def seen(x: AdvantageInputs) -> Tensor:
        shown.append(x)
        return x.per_token(x.scores)

    monkeypatch.setitem(ESTIMATORS, "seen", seen)
    return shown


# Rewards


def test_a_score_is_the_reward_of_the_last_generated_token(episodes: list[AdvantageInputs]) -> None:
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
def test_kl_in_the_reward_is_subtracted_from_every_generated_token(
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


def test_the_exact_kl_in_the_reward_is_that_of_the_two_tables(episodes: list[AdvantageInputs]) -> None:
    actor, reference, step = Table(), Table(seed=1), step_of(SAMPLES, micro=2)
    algorithm = AlgorithmSettings("seen", reward_kl=KlController(0.5), reward_kl_type="full")
    metrics = PolicyTrainer(actor, algorithm, reference=reference).prepare(step.samples, step.plan)
    kl = exact_kl(actor, reference, FlatBatch.from_samples(step.samples))
    assert metrics["actor/reward_kl"] == pytest.approx(float(kl.sum()) / GENERATED, rel=1e-5)
    PolicyTrainer(actor, AlgorithmSettings("seen")).prepare(step.samples, step.plan)
    torch.testing.assert_close(episodes[0].rewards, episodes[1].rewards - 0.5 * kl.double(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("weigh", [None, "token"])
def test_the_optimal_token_baseline_gets_the_probabilities_of_the_old_policy(weigh: str | None) -> None:
    actor, correction = Table(), Correction(weigh, threshold=1.5)
    drawn = with_rollout_logprobs(SAMPLES, actor, {0: 0.2, 3: -0.3, 4: 0.6})
    step = step_of(drawn, micro=2)
    policy = PolicyTrainer(actor, AlgorithmSettings("optimal_token_baseline", correction=correction))
    step.run(policy)
    [seen], before = actor.seen, actor.before[0]
    tokens = seen.mask.nonzero().squeeze(-1)
    rows = before.log_softmax(-1)[seen.tokens[tokens - 1]].double()
    norms = torch.zeros(seen.num_tokens, dtype=torch.float64)
    norms[tokens] = 1 - 2 * rows.gather(1, seen.tokens[tokens, None])[:, 0].exp() + rows.exp().square().sum(-1)
    if weigh is not None:
        assert seen.weights is not None
        assert len(set(seen.weights[tokens].tolist())) > 2
        norms *= seen.weights.double().square()
    ours = by_token(seen, seen.advantages)
    responses = {tuple(one.tokens): one for one in step.samples}
    spans = dict(zip(ours, norms.split(seen.lengths.tolist()), strict=True))
    for key, one in responses.items():
        group = [
            (other.score, spans[name][torch.from_numpy(other.mask)])
            for name, other in responses.items()
            if other.group == one.group
        ]
        for k in range(int(one.mask.sum())):
            reaching = [(score, float(parts[: k + 1].sum())) for score, parts in group if len(parts) > k]
            total = sum(weight for _, weight in reaching)
            baseline = sum(score * weight for score, weight in reaching) / total if len(reaching) > 1 else 0.0
            assert ours[key][k] == pytest.approx(one.score - baseline, abs=1e-5)


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
def test_a_constant_kl_coefficient_comes_from_the_settings_after_a_resume(
    before: KlController | None, tmp_path: Any
) -> None:
    def policy(controller: KlController | None) -> PolicyTrainer:
        return PolicyTrainer(Table(), AlgorithmSettings(reward_kl=controller), reference=Table(seed=1))

    step = step_of(SAMPLES)
    assert step.run(resumed(policy(KlController(0.1)), policy(before), tmp_path))["actor/reward_kl_coef"] == 0.1


@pytest.mark.parametrize("contents", [("model",), ("optimizer",), ("extra",), ("model", "extra"), ()])
def test_save_contents_and_load_contents_select_what_is_saved_and_loaded(
    contents: tuple[str, ...], tmp_path: Any
) -> None:
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


def test_a_constant_kl_coefficient_does_not_change() -> None:
    step, policy = (
        step_of(SAMPLES),
        PolicyTrainer(Table(), AlgorithmSettings(reward_kl=KlController(0.5)), reference=Table(seed=1)),
    )
    assert {step.run(policy)["actor/reward_kl_coef"] for _ in range(3)} == {0.5}


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
def test_a_custom_estimator_is_used() -> None:
    actor, step = Table(), step_of(SAMPLES)
    step.run(PolicyTrainer(actor, AlgorithmSettings("mine_of_this_test:doubled")))
    advantages = by_token(actor.seen[0], actor.seen[0].advantages)
    for one in SAMPLES:
        assert advantages[tuple(one.tokens)] == [2 * one.score] * int(one.mask.sum())


@pytest.mark.usefixtures("custom_functions")
def test_a_custom_estimator_with_returns_trains_a_critic() -> None:
    valuer, step = critic(), step_of(SAMPLES, **CRITIC_SIZES)
    metrics = step.run(PolicyTrainer(Table(), AlgorithmSettings("mine_of_this_test:with_returns"), critic=valuer))
    returns = by_token(valuer.seen[0], valuer.seen[0].returns)
    for one in SAMPLES:
        assert returns[tuple(one.tokens)] == [one.score + 1] * int(one.mask.sum())
    assert "critic/explained_variance" in metrics


@pytest.mark.usefixtures("custom_functions")
def test_a_critic_with_an_estimator_without_returns_is_refused_with_a_fix() -> None:
    step = step_of(SAMPLES, **CRITIC_SIZES)
    with pytest.raises(ConfigError, match=r"doubled returned advantages but no returns .* critic.enable=false"):
        step.run(PolicyTrainer(Table(), AlgorithmSettings("mine_of_this_test:doubled"), critic=critic()))


@pytest.mark.usefixtures("custom_functions")
@pytest.mark.parametrize("name", ["plain", "clipped"])
def test_a_custom_loss_trains_like_the_built_in_one_of_the_same_formula(name: str) -> None:
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
def test_a_function_that_does_not_exist_is_refused_before_the_first_step(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.adv_estimator: {message}"):
        PolicyTrainer(Table(), AlgorithmSettings(name))
    with pytest.raises(ConfigError, match=f"actor_rollout_ref.actor.policy_loss.loss_mode: {message}"):
        PolicyTrainer(Table(), AlgorithmSettings(loss_mode=name))


# All together


def test_a_rank_without_samples_prepares_and_updates_nothing() -> None:
    handles = [SampleHandle("only", 0, 4, 2, 1.0, 0)]
    planner = Planner(2, BatchSizes(1, 1, None), critic=BatchSizes(1, 1, None))
    empty = next(plan for plan in planner.plan(handles).ranks if not len(plan))
    for loss_mode in LOSSES:
        actor = Table()
        step = Step([], empty)
        algorithm = algorithm_of(loss_mode, estimator="gae", reward_kl=KlController(0.1), correction=REJECTING)
        step.run(PolicyTrainer(actor, algorithm, reference=Table(), critic=critic()))
        assert torch.equal(actor.table, actor.before[0])


def test_the_batch_is_released_after_the_update() -> None:
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


def test_values_of_tokens_are_read_by_sample_between_prepare_and_update() -> None:
    actor, step = Table(), step_of(SAMPLES)
    policy = PolicyTrainer(actor, AlgorithmSettings("grpo"))
    policy.prepare(step.samples, step.plan)
    batch = FlatBatch.from_samples(step.samples)
    expected = actor.lookup_logprobs(batch).split(batch.lengths.tolist())
    for index, one in enumerate(step.samples):
        logprobs, advantages = policy.read_tokens(index)
        torch.testing.assert_close(torch.from_numpy(logprobs), expected[index].float())
        assert len(advantages) == len(one.tokens)
        assert not advantages[~one.mask].any()
