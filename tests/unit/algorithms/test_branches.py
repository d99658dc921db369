"""Episodes with several branches: their number changes no baseline, no total weight and no expected gradient."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from verl.agents.transcript import Transcript
from verl.algorithms.advantages import ESTIMATORS, AdvantageInputs
from verl.algorithms.aggregate import MODES, BranchWeights, aggregate, count_totals
from verl.algorithms.objective import weigh_branches
from verl.algorithms.settings import EstimatorOptions
from verl.data.flat_batch import FlatBatch
from verl.types import Completion, Sample

pytestmark = pytest.mark.unit

GROUPED = ("grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline", "win_rate", "gdpo")
USES_LENGTHS = ("opo", "reinforce_plus_plus_baseline", "gdpo")  # a second last turn makes an episode longer


def complete(*tokens: int) -> Completion:
    return Completion(list(tokens), np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")


def make_episode(group: int, index: int, score: float, lengths: list[int], branches: int = 1) -> list[Sample]:
    """An episode of turns of these lengths, whose last turn is there `branches` times."""
    transcript, parent = Transcript(), None
    for length in lengths[:-1]:
        parent = transcript.add([1, 2], complete(*range(length)), parent)
    for _ in range(branches):
        transcript.add([1, 2], complete(*range(lengths[-1])), parent)
    return transcript.to_samples(group, index, score, {})


def make_inputs(samples: list[Sample]) -> tuple[FlatBatch, AdvantageInputs]:
    batch = FlatBatch.from_samples(samples)
    scores = torch.tensor([sample.score for sample in samples], dtype=torch.float64)
    rewards = torch.zeros(batch.num_tokens, dtype=torch.float64)
    return batch, AdvantageInputs(
        scores=scores,
        groups=torch.tensor([sample.group for sample in samples]),
        mask=batch.mask,
        offsets=batch.offsets,
        rewards=rewards,
        components={"score": scores},
        episodes=torch.tensor([sample.index for sample in samples]),
        branches=torch.tensor([sample.branches for sample in samples], dtype=torch.float64),
        token_shares=None if batch.shares is None else batch.shares.double(),
        options=EstimatorOptions(),
    )


def make_group(branches: int) -> list[Sample]:
    episodes = [([3, 2], 1.0, branches), ([1, 4], 0.0, 1), ([2, 2], 0.5, 1)]
    return [
        sample
        for group in range(2)
        for index, (lengths, score, count) in enumerate(episodes)
        for sample in make_episode(group, index, score + group, lengths, count if group == 0 else 1)
    ]


@pytest.mark.parametrize("name", [name for name in GROUPED if name not in USES_LENGTHS])
def test_a_duplicated_branch_changes_no_baseline(name: str) -> None:
    def estimate(branches: int) -> list[float]:
        samples = make_group(branches)
        batch, inputs = make_inputs(samples)
        advantages = ESTIMATORS[name](inputs)
        assert isinstance(advantages, torch.Tensor)
        means = [part[part_mask].mean() for part, part_mask in zip(*split(batch, advantages), strict=True)]
        last = {(sample.group, sample.index): float(mean) for sample, mean in zip(samples, means, strict=True)}
        return list(last.values())

    def split(batch: FlatBatch, values: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        lengths = batch.lengths.tolist()
        return list(values.split(lengths)), list(batch.mask.split(lengths))

    assert estimate(3) == pytest.approx(estimate(1), abs=1e-12)


def repeat_sample(samples: list[Sample], times: int) -> list[Sample]:
    """The first sample several times, as if as many branches had the same turns."""
    first, *others = samples
    shares = np.full(len(first.tokens), 1 / times, np.float32)
    count = int(first.mask.sum())
    return [replace(first, branches=times, shares=shares, episode_tokens=count) for _ in range(times)] + others


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("mode", MODES)
def test_a_repeated_branch_counts_once(name: str, mode: str) -> None:
    def loss(samples: list[Sample]) -> float:
        batch, inputs = make_inputs(samples)
        advantages = ESTIMATORS[name](inputs)
        assert isinstance(advantages, torch.Tensor)
        values = advantages * (1 + batch.positions)
        weights = weigh_branches(batch)
        totals = count_totals(batch.mask, batch.offsets, weights)
        return float(aggregate(values, batch.mask, batch.offsets, mode, totals, scale=10.0, branches=weights))

    samples = make_group(1)
    assert loss(repeat_sample(samples, 3)) == pytest.approx(loss(samples), rel=1e-6)


def test_a_turn_of_several_branches_counts_once_and_an_episode_is_one_sequence() -> None:
    batch = FlatBatch.from_samples(make_episode(0, 0, 1.0, [3, 2], branches=2) + make_episode(0, 1, 0.0, [4]))
    weights = weigh_branches(batch)
    assert isinstance(weights, BranchWeights)
    totals = count_totals(batch.mask, batch.offsets, weights)
    assert (totals.tokens, totals.sequences) == pytest.approx((3 + 2 + 2 + 4, 2))


@pytest.mark.parametrize("times", [2, 3])
def test_a_repeated_branch_does_not_change_the_token_baseline(times: int) -> None:
    def estimate(samples: list[Sample]) -> list[torch.Tensor]:
        batch, inputs = make_inputs(samples)
        step = 1 + batch.positions.double()
        inputs = replace(
            inputs,
            rewards=inputs.scores[batch.segment_ids] * batch.mask,
            logprobs=-0.1 * step,
            sum_pi_squared=(-0.2 * step).exp() + 0.01 * step,
        )
        return list(ESTIMATORS["optimal_token_baseline"](inputs).split(batch.lengths.tolist()))

    samples = make_group(1)
    repeated, once = estimate(repeat_sample(samples, times)), estimate(samples)
    for ours, expected in zip(repeated, [once[0]] * times + once[1:], strict=True):
        assert ours.tolist() == pytest.approx(expected.tolist(), abs=1e-9)


def test_branches_of_one_episode_are_nothing_to_compare_with() -> None:
    batch, inputs = make_inputs(make_episode(0, 0, 1.0, [2], branches=3))
    zeros = torch.zeros(batch.num_tokens, dtype=torch.float64)
    inputs = replace(inputs, rewards=batch.mask.double(), logprobs=zeros - 1.0, sum_pi_squared=zeros + 0.5)
    advantages = ESTIMATORS["optimal_token_baseline"](inputs)
    assert isinstance(advantages, torch.Tensor)
    assert advantages[batch.mask].tolist() == [2.0, 1.0] * 3


# A bandit with optional stopping: each turn ends with nothing, ends with a prize, or goes on at a price.
LEAVE, TAKE, GO_ON = range(3)
PRIZE, PRICE, LONGEST = 1.0, 0.2, 3


def list_episodes() -> list[tuple[int, ...]]:
    stops = [(*[GO_ON] * count, last) for count in range(LONGEST) for last in (LEAVE, TAKE)]
    return [*stops, (GO_ON,) * LONGEST]


def score_episode(actions: tuple[int, ...]) -> float:
    return PRIZE * (actions[-1] == TAKE) - PRICE * actions.count(GO_ON)


def make_stopping(index: int, actions: tuple[int, ...], *, branch_per_turn: bool) -> list[Sample]:
    transcript, parent = Transcript(), None
    for action in actions:
        parent = transcript.add([9], complete(action), None if branch_per_turn else parent)
    return transcript.to_samples(0, index, score_episode(actions), {})


@pytest.mark.parametrize("branch_per_turn", [False, True])
def test_the_gradient_of_a_bandit_with_optional_stopping_is_the_analytic_one(branch_per_turn: bool) -> None:
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    logprobs, episodes = logits.log_softmax(0), list_episodes()
    chances = [logprobs[list(actions)].sum().exp() for actions in episodes]
    assert float(sum(chances).detach()) == pytest.approx(1.0)
    value = sum(chance * score_episode(actions) for chance, actions in zip(chances, episodes, strict=True))
    [exact] = torch.autograd.grad(value, logits, retain_graph=True)

    expected = torch.zeros(3, dtype=torch.float64)
    for (first, one), (second, other) in itertools.product(zip(chances, episodes, strict=True), repeat=2):
        samples = make_stopping(0, one, branch_per_turn=branch_per_turn)
        samples += make_stopping(1, other, branch_per_turn=branch_per_turn)
        batch, inputs = make_inputs(samples)
        advantages = ESTIMATORS["rloo"](inputs)
        assert isinstance(advantages, torch.Tensor)
        values = logits.log_softmax(0)[batch.tokens.clamp(max=2)] * advantages
        weights = weigh_branches(batch)
        totals = count_totals(batch.mask, batch.offsets, weights)
        gain = aggregate(values, batch.mask, batch.offsets, "seq-mean-token-sum", totals, branches=weights)
        expected += (first * second).detach() * torch.autograd.grad(gain, logits)[0]
    assert expected.tolist() == pytest.approx(exact.tolist(), abs=1e-7)


def test_a_repeated_branch_changes_no_advantage_of_gigpo() -> None:
    def estimate(samples: list[Sample]) -> list[list[float]]:
        batch, inputs = make_inputs(samples)
        starts = batch.offsets.tolist()
        turns = [  # the first turn is in the state of others, and earns nothing; the second one earns some of the score
            (start + at, index, 0.2 * index, index + sample.index * (index > 0))
            for start, sample in zip(starts, samples, strict=False)
            for at, index, _, _ in sample.turns
        ]
        advantages = ESTIMATORS["gigpo"](replace(inputs, turns=torch.tensor(turns).double()))
        assert isinstance(advantages, torch.Tensor)
        return [each.tolist() for each in advantages.split(batch.lengths.tolist())]

    samples = make_group(1)
    once = estimate(samples)
    assert len({*once[0], 0.0}) == 3, "the turns of an episode have different advantages"
    for ours, expected in zip(estimate(repeat_sample(samples, 3)), once[:1] * 3 + once[1:], strict=True):
        assert ours == pytest.approx(expected)
