import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    EstimatorOptions,
    explained_variance,
    gae,
    gdpo,
    gigpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    optimal_token_baseline,
    prime,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    whiten,
    win_rate,
)

pytestmark = pytest.mark.unit

eighths = st.integers(-40, 40).map(lambda n: n / 8)
samples = st.lists(st.tuples(st.integers(-3, 3), eighths), min_size=1, max_size=20)


def responses(
    scores,
    groups=None,
    masks=None,
    rewards=None,
    *,
    process=None,
    baselines=None,
    values=None,
    components=None,
    logprobs=None,
    squares=None,
    **options,
):
    """One sequence per score; without masks each is a single generated token."""
    masks = masks or [[1]] * len(scores)
    components = {"score": scores} if components is None else components
    flat = lambda rows: torch.tensor([v for row in rows for v in row], dtype=torch.float64)  # noqa: E731
    ends = [[0.0] * (len(mask) - 1) + [score] for mask, score in zip(masks, scores, strict=True)]
    return AdvantageInputs(
        scores=torch.tensor(scores, dtype=torch.float64),
        groups=torch.tensor(groups or [0] * len(scores)),
        mask=flat(masks).bool(),
        offsets=torch.tensor([0, *map(len, masks)]).cumsum(0),
        rewards=flat(rewards or ends),
        values=None if values is None else flat(values),
        baselines=None if baselines is None else torch.tensor(baselines, dtype=torch.float64),
        process=None if process is None else flat(process),
        logprobs=None if logprobs is None else flat(logprobs),
        sum_pi_squared=None if squares is None else flat(squares),
        components={name: torch.tensor(values).double() for name, values in components.items()},
        options=EstimatorOptions(**options),
    )


@given(samples, st.booleans())
@settings(max_examples=50, deadline=None)
def test_grpo_is_its_formula_for_groups_in_any_order(samples, by_std):
    groups, scores = (list(column) for column in zip(*samples, strict=True))
    advantages = grpo(responses(scores, groups, by_std=by_std))
    for i, (group, score) in enumerate(samples):
        peers = [s for g, s in samples if g == group]
        if len(peers) == 1:
            expected = score
        else:
            expected = score - statistics.fmean(peers)
            expected /= statistics.stdev(peers) + 1e-6 if by_std else 1.0
        assert float(advantages[i]) == pytest.approx(expected, abs=1e-9)


def test_grpo_of_right_and_wrong_responses():
    advantages = grpo(responses([1.0, 0.0, 0.0, 1.0], [5, 2, 5, 2]))
    assert advantages.tolist() == pytest.approx([0.70711, -0.70711, -0.70711, 0.70711], abs=1e-4)


@pytest.mark.parametrize("estimator", [grpo, rloo, opo, gpg, grpo_passk, reinforce_plus_plus_baseline, win_rate])
def test_equal_scores_have_no_signal(estimator):
    assert estimator(responses([0.1] * 4)).abs().max() < 1e-6


@pytest.mark.parametrize("estimator", [grpo, rloo, opo, gpg])
def test_a_group_of_one_keeps_its_score(estimator):
    assert estimator(responses([0.25, 3.0], [1, 2])).tolist() == [0.25, 3.0]


def test_the_optimal_baseline_of_a_token_weighs_returns_by_the_gradients_so_far():
    # 1 - 2 p + squares of the tokens: 0.5, 0.5 and 0.25, 0, 0.75
    logprobs = [[math.log(0.5), math.log(0.5)], [math.log(0.75), 0.0, math.log(0.5)]]
    squares = [[0.5, 0.5], [0.75, 1.0, 0.75]]
    x = responses([1.0, 4.0], None, [[1, 1], [1, 1, 1]], logprobs=logprobs, squares=squares)
    first, second = (0.5 * 1 + 0.25 * 4) / 0.75, (1.0 * 1 + 0.25 * 4) / 1.25
    expected = [1 - first, 1 - second, 4 - first, 4 - second, 4.0]  # no other response has a third token
    assert optimal_token_baseline(x).tolist() == pytest.approx(expected, abs=1e-6)
    doubled = replace(x, importance=torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    first, second = (2.0 * 1 + 0.25 * 4) / 2.25, (4.0 * 1 + 0.25 * 4) / 4.25
    expected = [1 - first, 1 - second, 4 - first, 4 - second, 4.0]
    assert optimal_token_baseline(doubled).tolist() == pytest.approx(expected, abs=1e-6)


def test_the_optimal_baseline_is_exact_for_tokens_of_probability_one():
    certain, almost = 0.0, math.log1p(-6e-8)
    x = responses([1.0, 3.0], None, [[1], [1]], logprobs=[[certain], [almost]], squares=[[1 - 1e-7], [1 - 1.9e-7]])
    advantages = optimal_token_baseline(x)
    assert advantages.tolist() == pytest.approx([1.0, 3.0])  # without a gradient, none is better than another


def test_the_optimal_token_baseline_needs_probabilities():
    with pytest.raises(ValueError, match="no sums of squared probabilities"):
        optimal_token_baseline(responses([1.0, 0.0]))


def test_groups_of_one_are_whitened_with_their_scores():
    advantages = reinforce_plus_plus_baseline(responses([0.0, 1.0, 5.0], [1, 2, 3]))
    assert advantages.tolist() == pytest.approx([-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5])


def test_groups_are_distinguished_by_ids_of_any_size():
    assert rloo(responses([1.0, 0.0, 5.0], [2**52 + 1, 2**52 + 1, 2**52])).tolist() == [1.0, -1.0, 5.0]


@given(samples)
@settings(max_examples=50, deadline=None)
def test_rloo_compares_with_the_mean_of_the_others(samples):
    groups, scores = (list(column) for column in zip(*samples, strict=True))
    advantages = rloo(responses(scores, groups))
    for i, (group, score) in enumerate(samples):
        others = [s for j, (g, s) in enumerate(samples) if g == group and j != i]
        assert float(advantages[i]) == pytest.approx(score - (statistics.fmean(others) if others else 0.0), abs=1e-9)


def test_opo_counts_longer_responses_more():
    assert opo(responses([1.0, 0.0], masks=[[1, 1, 1], [1]])).tolist() == pytest.approx([0.25, 0.25, 0.25, -0.75])


def test_gpg_scales_by_the_share_of_nonzero_scores():
    assert gpg(responses([1.0, 0.0, 0.0, 0.0])).tolist() == pytest.approx([3.0, -1.0, -1.0, -1.0])


def test_gigpo_credits_a_turn_by_what_followed_from_its_state():
    # Two episodes of two turns. Both begin in state 1; their second turns are in states of their own.
    x = responses([1.0, 0.0], masks=[[0, 1, 0, 1]] * 2, by_std=False, gamma=0.5, step_weight=2.0)
    x = replace(x, turns=torch.tensor([[1, 0, 0, 1], [3, 1, 1, 2], [5, 0, 0, 1], [7, 1, 0, 3]]).double())
    episode, step = 0.5, 2.0 * 0.5 * 0.5  # the reward of the second turn is discounted once, and half is the mean
    assert gigpo(x).tolist() == pytest.approx([0, episode + step, 0, episode, 0, -episode - step, 0, -episode])
    alone = replace(x, turns=None)  # each response is one turn, and all begin in one state
    assert gigpo(alone).tolist() == pytest.approx((3.0 * grpo(alone)).tolist())


def test_grpo_passk_rewards_the_lead_of_the_best_alone():
    x = responses([0.2, 1.0, 0.7, 0.5], [1, 1, 2, 2], by_std=False)
    assert grpo_passk(x).tolist() == pytest.approx([0.0, 0.8, 0.2, 0.0])
    assert grpo_passk(responses([1.0])).tolist() == [0.0]  # the others could not be scored


def test_win_rate_counts_a_tie_as_half_a_win():
    assert win_rate(responses([2.0, 1.0, 1.0, 0.0])).tolist() == pytest.approx([0.5, 0.0, 0.0, -0.5])


def test_rewards_are_discounted_by_the_generated_tokens_in_between():
    x = responses([1.0, 0.0], masks=[[1, 0, 0, 1, 1], [1]], gamma=0.5)
    raw = torch.tensor([0.25, 0.0, 0.0, 0.5, 1.0, 0.0]).double()
    assert reinforce_plus_plus(x).tolist() == pytest.approx(whiten(raw, x).tolist())


def test_remax_is_the_return_minus_the_score_of_the_greedy_response():
    x = responses([1.0, 0.5], masks=[[0, 1, 1], [1]], rewards=[[9.0, -0.5, 1.5], [0.5]], baselines=[0.25, 1.0])
    assert remax(x).tolist() == [0.0, 0.75, 1.25, -0.5]


def test_prime_adds_what_its_tokens_gain_over_those_of_the_others():
    x = responses([1.0, 0.0], masks=[[1, 1], [1, 1]], process=[[0.3, 0.1], [0.5, -0.1]])
    # rloo: +1 and -1. The largest sum to the end is 0.4; the others' tokens gained 0.2 / 0.4 on average, in both cases.
    raw = torch.tensor([5.0, 5.0 - 5 * 0.25, -5.0, -5.0 - 5 * 0.75]).double()
    assert prime(x).tolist() == pytest.approx(whiten(raw, x).tolist(), rel=1e-4)


def test_the_scale_of_process_rewards_does_not_change_their_weight():
    plain, larger = (
        prime(responses([1.0, 0.0], masks=[[1, 1]] * 2, process=[[3 * scale, scale], [5 * scale, -scale]]))
        for scale in (1e3, 1e4)
    )
    assert plain.tolist() == pytest.approx(larger.tolist(), rel=1e-6)


def test_gae_by_hand():
    x = responses([1.0], masks=[[0, 1, 1]], values=[[7.0, 0.5, 0.25]], gamma=0.9, lam=0.8)
    last = 1.0 - 0.25
    first = 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * last
    advantages, returns = gae(x)
    assert returns.tolist() == pytest.approx([0.0, first + 0.5, last + 0.25])
    assert advantages.tolist() == pytest.approx([0.0, -(0.5**0.5), 0.5**0.5], abs=1e-6)


@pytest.mark.parametrize("name", sorted({*ESTIMATORS} - {"grpo_vectorized", "rloo_vectorized"}))
def test_tool_output_in_between_makes_no_difference(name):
    torch.manual_seed(0)
    columns = torch.randn(3, 7, dtype=torch.float64).tolist()
    columns += [[math.log(0.1 * (k + 1)) for k in range(7)], [0.9] * 7]
    cut = lambda row: [row[:4], row[4:]]  # noqa: E731
    widen = lambda rows: [[9.0, rows[0][0], 9.0, 9.0, *rows[0][1:]], [*rows[1], 9.0]]  # noqa: E731
    rewards, values, process, logprobs, squares = (cut(row) for row in columns)
    rest = {"baselines": [0.1, 0.1], "gamma": 0.9, "lam": 0.8}
    narrow = {"values": values, "process": process, "logprobs": logprobs, "squares": squares}
    short = responses([1.0, 0.0], None, [[1] * 4, [1] * 3], rewards, **narrow, **rest)
    masks = [[0, 1, 0, 0, 1, 1, 1], [1, 1, 1, 0]]
    wide = {name: widen(rows) for name, rows in narrow.items()}
    long = responses([1.0, 0.0], None, masks, widen(rewards), **wide, **rest)
    for ours, expected in zip(*(_as_tuple(ESTIMATORS[name](x)) for x in (long, short)), strict=True):
        assert ours[long.mask].tolist() == pytest.approx(expected.tolist())
        assert not ours[~long.mask].any()


def _as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


@given(st.lists(eighths, min_size=2, max_size=20))
def test_whitened_values_have_mean_zero_and_unbiased_variance_one(values):
    white = whiten(torch.tensor(values, dtype=torch.float64), responses([0.0] * len(values))).tolist()
    assert statistics.fmean(white) == pytest.approx(0.0, abs=1e-9)
    if len(set(values)) > 1:
        assert statistics.variance(white) == pytest.approx(1.0, abs=1e-4)
    else:
        assert white == pytest.approx([0.0] * len(values))


def test_a_perfect_critic_explains_all_and_a_constant_one_nothing():
    returns = torch.tensor([1.0, 2.0, 4.0]).double()
    scores = [0.0, 0.0, 0.0]
    assert explained_variance(responses(scores, values=[[1.0], [2.0], [4.0]]), returns) == pytest.approx(1.0)
    assert explained_variance(responses(scores, values=[[3.0], [3.0], [3.0]]), returns) == pytest.approx(0.0)
    assert explained_variance(responses(scores, values=[[0.0]] * 3), torch.ones(3).double()) == 0.0


@pytest.mark.parametrize(
    ("estimator", "lacks"), [(gae, "no values"), (remax, "no greedy baseline"), (prime, "no process rewards")]
)
def test_an_estimator_that_lacks_something_says_what(estimator, lacks):
    with pytest.raises(ValueError, match=lacks):
        estimator(responses([1.0, 0.0]))


def test_gdpo_normalizes_each_component_by_itself():
    components = {"correct": [0.0, 0.0, 0.0, 1.0], "length": [400.0, 100.0, 400.0, 100.0]}
    x = responses([0.0] * 4, components=components, component_weights={"length": 0.5})
    correct = [(c - 0.25) / (0.5 + 1e-6) for c in components["correct"]]
    length = [(c - 250) / (statistics.stdev(components["length"]) + 1e-6) for c in components["length"]]
    sums = [a + 0.5 * b for a, b in zip(correct, length, strict=True)]
    expected = [a / (statistics.variance(sums) + 1e-8) ** 0.5 for a in sums]
    assert gdpo(x).tolist() == pytest.approx(expected)


def test_gdpo_does_not_depend_on_the_scale_of_a_component():
    small, large = [0.0, 1.0, 1.0, 0.0], [3.0, 1.0, 4.0, 2.0]
    first = gdpo(responses([0.0] * 4, components={"a": small, "b": large}))
    second = gdpo(responses([0.0] * 4, components={"a": small, "b": [1000 * c for c in large]}))
    assert first.tolist() == pytest.approx(second.tolist(), abs=1e-5)


def test_gdpo_tells_apart_responses_with_the_same_sum():
    components = {"correct": [1.0, 0.0, 0.0, 0.0], "format": [0.0, 1.0, 1.0, 1.0]}
    scores = [1.0] * 4
    assert grpo(responses(scores)).abs().max() < 1e-6
    assert gdpo(responses(scores, components=components, component_weights={"format": 0.1}))[0] > 1


def test_a_group_of_one_keeps_its_components_in_gdpo():
    advantages = gdpo(responses([0.0] * 2, [1, 2], components={"a": [3.0, 1.0], "b": [0.0, 1.0]}))
    assert advantages.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])  # 3 and 2, whitened


def test_gdpo_without_components_names_the_setting():
    with pytest.raises(ValueError, match=r"set algorithm\.reward_components"):
        gdpo(responses([0.0, 1.0], components={}))
