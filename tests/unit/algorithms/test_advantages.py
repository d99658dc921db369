import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantages import grpo

pytestmark = pytest.mark.unit


eighths = st.integers(-40, 40).map(lambda n: n / 8)


@given(st.lists(st.tuples(st.integers(-3, 3), eighths), min_size=1, max_size=20), st.booleans())
@settings(max_examples=100, deadline=None)
def test_grpo_is_its_formula_for_groups_in_any_order(samples, by_std):
    groups, scores = zip(*samples, strict=True)
    advantages = grpo(torch.tensor(scores), torch.tensor(groups), by_std=by_std)
    for i, (group, score) in enumerate(samples):
        peers = [s for g, s in samples if g == group]
        if len(peers) == 1:
            expected = score
        else:
            expected = score - statistics.fmean(peers)
            expected /= statistics.stdev(peers) + 1e-6 if by_std else 1.0
        assert float(advantages[i]) == pytest.approx(expected, abs=1e-5)


def test_grpo_of_right_and_wrong_answers():
    advantages = grpo(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([5, 2, 5, 2]))
    assert advantages.tolist() == pytest.approx([0.70711, -0.70711, -0.70711, 0.70711], abs=1e-4)


def test_equal_scores_carry_no_signal():
    assert grpo(torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int64)).abs().max() < 1e-6


def test_a_group_of_one_keeps_its_score():
    assert grpo(torch.tensor([0.25, 3.0]), torch.tensor([1, 2])).tolist() == [0.25, 3.0]
