import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantages import AdvantageInputs
from verl.algorithms.correction import importance_weights, mismatch_metrics, mismatch_moments, rejection_mask
from verl.algorithms.objective import average_weights
from verl.algorithms.settings import Correction, Rejection

pytestmark = pytest.mark.unit

ROLLOUT = torch.zeros(5, dtype=torch.float64)
OLD = torch.tensor([0.1, 0.4, 9.0, -1.0, 0.9], dtype=torch.float64)
MASK = torch.tensor([1, 1, 0, 1, 1]).bool()
OFFSETS = torch.tensor([0, 3, 5])


def make_inputs(mask=MASK, offsets=OFFSETS, gather=lambda rows: rows):
    groups, rewards = torch.arange(len(offsets) - 1), torch.zeros(len(mask)).double()
    return AdvantageInputs(groups.double(), groups, mask, offsets, rewards, gather=gather)


def weights(correction, old=OLD, gather=lambda rows: rows):
    return importance_weights(make_inputs(gather=gather), old, ROLLOUT, correction).tolist()


def test_token_weights_are_truncated_above_and_never_below():
    expected = [math.exp(0.1), math.exp(0.4), 0.0, math.exp(-1.0), 2.0]
    assert weights(Correction(weigh="token", threshold=2.0)) == pytest.approx(expected)


def test_weights_of_sequences_multiply_those_of_their_tokens():
    first, second = math.exp(0.5), math.exp(-0.1)
    assert weights(Correction(weigh="sequence")) == pytest.approx([first, first, 0.0, second, second])
    assert weights(Correction(weigh="sequence", threshold=1.5)) == pytest.approx([1.5, 1.5, 0.0, second, second])


def test_a_sequence_whose_ratio_overflows_is_outside_every_range():
    correction = Correction(weigh="sequence", threshold=2.0, threshold_lower=0.5)
    inputs = AdvantageInputs(
        torch.zeros(1), torch.zeros(1), torch.ones(8).bool(), torch.tensor([0, 8]), torch.zeros(8).double()
    )
    assert importance_weights(inputs, torch.full((8,), 15.0), torch.zeros(8), correction).tolist() == [0.0] * 8


def test_the_geometric_mean_of_weights_is_zero_if_a_generated_token_has_none():
    inputs, per_token = make_inputs(), torch.tensor([4.0, 1.0, 0.0, 0.0, 2.0])
    expected = [2.0, 2.0, 2.0, 0.0, 0.0]  # the third token was not generated
    assert average_weights(per_token, "geo_mean", inputs.average_episodes).tolist() == pytest.approx(expected)


def test_one_token_counts_for_no_more_than_twenty():
    far = torch.tensor([50.0, -19.5, 0.0, -50.0, 20.0]).double()
    assert weights(Correction(weigh="sequence"), far)[0] == pytest.approx(math.exp(0.5))
    assert weights(Correction(weigh="sequence"), far)[3] == pytest.approx(1.0)


@given(st.sampled_from(["token", "sequence"]), st.lists(st.floats(-30, 30), min_size=5, max_size=5))
@settings(deadline=None)
def test_normalized_weights_have_mean_one_over_all_ranks(level, old):
    old, other = (
        torch.tensor(old).double(),
        torch.tensor([[3.0, 4.0]]).double(),
    )  # elsewhere: 3.0 in all on 4 tokens or sequences
    results = weights(Correction(level, normalize=True), old, lambda rows: torch.cat([rows, other]))
    plain = weights(Correction(level), old)
    mean = (sum(plain) + 3.0) / 8 if level == "token" else (plain[0] + plain[3] + 3.0) / 6
    assert results == pytest.approx([weight / mean for weight in plain])


def test_icepop_drops_the_weights_of_tokens_that_differ_too_much_in_either_direction():
    correction = Correction(weigh="token", threshold=2.0, threshold_lower=0.5)
    assert weights(correction) == pytest.approx([math.exp(0.1), math.exp(0.4), 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("name", "upper", "expected"),
    [
        ("token_k2", 0.1, [1, 1, 0, 0, 0]),  # 0.005, 0.08, 0.5, 0.405
        ("token_k3", 0.1, [1, 1, 0, 0, 0]),  # 0.0052, 0.0918, 0.368, 0.56
        ("seq_mean_k2", 0.1, [1, 1, 0, 0, 0]),
        ("seq_max_k2", 0.05, [0, 0, 0, 0, 0]),
        ("seq_max_k3", 0.6, [1, 1, 0, 1, 1]),
    ],
)
def test_estimates_of_the_kl_have_only_an_upper_bound(name, upper, expected):
    mask = rejection_mask(make_inputs(), OLD, ROLLOUT, [Rejection(name, 0.0, upper)])
    assert mask.tolist() == [bool(e) for e in expected]


def test_several_criteria_reject_together():
    criteria = [Rejection("token", 0.0, 1.2), Rejection("seq_max_k3", 0.0, 0.5)]
    assert rejection_mask(make_inputs(), OLD, ROLLOUT, criteria).tolist() == [True, False, False, False, False]


def test_weights_carry_no_gradient():
    old = OLD.clone().requires_grad_()
    assert not importance_weights(make_inputs(), old, ROLLOUT, Correction("token")).requires_grad


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [1, 1, 0, 0, 0]),  # each by itself
        ("sequence", [0, 0, 0, 1, 1]),  # exp(0.5) is too much, exp(-0.1) is not
        ("geometric", [1, 1, 0, 1, 1]),  # exp(0.25) and exp(-0.05)
    ],
)
def test_rejected_tokens_are_removed_from_the_mask(level, expected):
    mask = rejection_mask(make_inputs(), OLD, ROLLOUT, [Rejection(level, 0.5, 1.6)])
    assert mask.tolist() == [bool(e) for e in expected]


def test_mismatch_of_all_ranks_is_that_of_one():
    torch.manual_seed(0)
    old, rollout = -torch.rand(2, 40).double()
    mask = torch.rand(40) < 0.7

    def measure(part):
        inputs = make_inputs(mask[part], torch.tensor([0, len(part)]))
        return mismatch_moments(inputs, old[part], rollout[part])

    whole = mismatch_metrics(measure(torch.arange(40))[None])
    parts = [measure(part) for part in torch.arange(40).split(15)]
    assert mismatch_metrics(torch.stack(parts)) == pytest.approx(whole)
    p, q = old[mask].exp(), rollout[mask].exp()
    assert whole["training/rollout_probs_diff_mean"] == pytest.approx(float((p - q).abs().mean()))
    assert whole["training/rollout_probs_diff_max"] == pytest.approx(float((p - q).abs().max()))
    assert whole["training/rollout_logprobs_diff_max"] == pytest.approx(float((old - rollout)[mask].abs().max()))
    assert whole["training/rollout_probs_corr"] == pytest.approx(float(torch.corrcoef(torch.stack([p, q]))[0, 1]))
    ratio = p / q
    effective = float(ratio.sum() ** 2 / ratio.square().sum())
    assert whole["training/rollout_ess"] == pytest.approx(effective / int(mask.sum()))


def test_without_spread_there_is_no_correlation_and_without_tokens_nothing_at_all():
    same = torch.full((3,), -1.0)
    inputs = make_inputs(torch.ones(3).bool(), torch.tensor([0, 3]))
    metrics = mismatch_metrics(mismatch_moments(inputs, same, same)[None])
    assert metrics["training/rollout_ess"] == pytest.approx(1.0)
    assert "training/rollout_probs_corr" not in metrics
    inputs = make_inputs(torch.zeros(3).bool(), torch.tensor([0, 3]))
    assert mismatch_metrics(mismatch_moments(inputs, same, same)[None]) == {}
