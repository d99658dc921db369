import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.losses import (
    LOSSES,
    LossInputs,
    LossOptions,
    cispo,
    clip_cov,
    dpo,
    geo_mean,
    gspo,
    kl_cov,
    sapo,
    sppo,
    vanilla,
)

pytestmark = pytest.mark.unit

OPTIONS = LossOptions(clip_low=0.2, clip_high=0.3, clip_c=3.0)


def tokens(log_ratios, advantages, mask=None, offsets=None, **fields):
    """Tokens whose old log-probs are 0; one sequence by default."""
    count = len(log_ratios)
    return LossInputs(
        logprobs=torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True),
        old_logprobs=torch.zeros(count, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=torch.tensor(mask or [1] * count).bool(),
        offsets=torch.tensor(offsets or [0, count]),
        **fields,
    )


def slopes(policy, x, weights=None):
    loss = policy.loss if weights is None else policy.loss * torch.tensor(weights)
    return torch.autograd.grad(loss.sum(), x.logprobs)[0].tolist()


@given(st.floats(-25, 25), st.floats(-5, 5))
@settings(max_examples=100, deadline=None)
def test_vanilla_is_its_formula(log_ratio, advantage):
    ratio = math.exp(max(-20.0, min(20.0, log_ratio)))
    expected = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3))
    if advantage < 0:
        expected = min(expected, -advantage * 3.0)
    assert vanilla(tokens([log_ratio], [advantage]), OPTIONS).loss.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("loss", [vanilla, lambda x, o: clip_cov(x, o), gspo, geo_mean])
@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clip"),
    [
        (0.1, 1.0, None),
        (0.1, -1.0, None),
        (0.5, 1.0, "clipped_high"),
        (0.5, -1.0, None),
        (-0.5, 1.0, None),
        (-0.5, -1.0, "clipped_low"),
        (2.0, -1.0, "clipped_dual"),
    ],
)
def test_a_clip_is_reported_exactly_where_it_removes_the_gradient(loss, log_ratio, advantage, clip):
    x = tokens([log_ratio], [advantage], selected=torch.tensor([False]))
    policy = loss(x, OPTIONS)
    if policy.clipped_dual is None and clip == "clipped_dual":
        clip = None
    names = ("clipped_high", "clipped_low", "clipped_dual")
    named = {name for name in names if (flag := getattr(policy, name)) is not None and flag.item()}
    assert named == ({clip} if clip else set())
    assert (slopes(policy, x) == [0.0]) == (clip is not None)


def test_gspo_clips_whole_sequences_by_their_mean_ratio():
    # Alone, the first token would be clipped; its sequence is not. The second sequence is.
    x = tokens([0.5, -0.3, 9.0, 0.4, 0.4], [1.0] * 5, mask=[1, 1, 0, 1, 1], offsets=[0, 3, 5])
    policy = gspo(x, OPTIONS)
    ratio = math.exp(0.1)
    assert policy.loss[x.mask].tolist() == pytest.approx([-ratio, -ratio, -1.3, -1.3])
    assert slopes(policy, x, [1.0, 1.0, 0.0, 1.0, 1.0]) == pytest.approx([-ratio, -ratio, 0.0, 0.0, 0.0])


@given(st.floats(-25, 25), st.floats(-5, 5))
@settings(max_examples=50, deadline=None)
def test_cispo_limits_the_weight_of_a_token_and_leaves_it_a_gradient(log_ratio, advantage):
    x = tokens([log_ratio], [advantage])
    weight = min(max(math.exp(log_ratio), 0.8), 1.3)
    assert slopes(cispo(x, OPTIONS), x) == pytest.approx([-advantage * weight])


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_cispo_reports_where_the_weight_is_clipped(advantage):
    policy = cispo(tokens([-0.5, 0.1, 0.5], [advantage] * 3), OPTIONS)
    assert policy.clipped_high.tolist() == [False, False, True]
    assert policy.clipped_low.tolist() == [True, False, False]
    wide = cispo(tokens([-9.0, 0.5], [advantage] * 2), LossOptions(clip_low=10.0, clip_high=10.0))
    assert not wide.clipped_low.any()
    assert not wide.clipped_high.any()


@given(st.floats(-5, 5), st.floats(0.1, 5), st.floats(0.1, 5))
def test_sapo_has_the_slope_of_the_policy_gradient_where_the_policies_agree(advantage, tau_pos, tau_neg):
    x = tokens([0.0], [advantage])
    assert slopes(sapo(x, LossOptions(tau_pos=tau_pos, tau_neg=tau_neg)), x) == pytest.approx([-advantage])


def test_geo_mean_clips_only_in_the_direction_of_the_advantage():
    x = tokens([0.5, -0.5, 0.1], [1.0] * 3)
    policy = geo_mean(x, OPTIONS)
    ratio = math.exp((0.3 - 0.5 + 0.1) / 3)
    assert policy.loss.tolist() == pytest.approx([-ratio] * 3)
    assert slopes(policy, x, [1 / 3] * 3) == pytest.approx([0.0, -ratio / 3, -ratio / 3])


def test_geo_mean_of_mixed_advantages_goes_by_their_mean():
    both = [geo_mean(tokens([0.5, -0.5], row), OPTIONS).loss.tolist() for row in ([3.0, -1.0], [1.0, 1.0])]
    assert both[0] == pytest.approx(both[1])


def test_clip_cov_removes_the_gradient_of_selected_tokens_only():
    plain = tokens([0.1, 0.1, 0.5], [1.0, 1.0, 1.0])
    x = tokens([0.1, 0.1, 0.5], [1.0, 1.0, 1.0], selected=torch.tensor([True, False, False]))
    policy = clip_cov(x, OPTIONS)
    assert policy.loss.tolist() == vanilla(plain, OPTIONS).loss.tolist()
    assert slopes(policy, x) == pytest.approx([0.0, -math.exp(0.1), 0.0])


def test_clip_cov_has_no_dual_clip():
    x = tokens([2.0], [-1.0], selected=torch.tensor([False]))
    policy = clip_cov(x, OPTIONS)
    assert policy.loss.tolist() == pytest.approx([math.exp(2.0)]), "vanilla stops at 3"
    assert slopes(policy, x) == pytest.approx([math.exp(2.0)])


def test_kl_cov_adds_a_penalty_to_selected_tokens():
    x = tokens([0.5, -0.5, 0.5], [1.0] * 3, selected=torch.tensor([True, True, False]))
    options = LossOptions(ppo_kl_coef=2.0)
    up, down = math.exp(0.5), math.exp(-0.5)
    assert kl_cov(x, options).loss.tolist() == pytest.approx([1.0 - up, 1.0 - down, -up])
    assert slopes(kl_cov(x, options), x) == pytest.approx([2.0 - up, -2.0 - down, -up])


def test_dpo_moves_all_tokens_of_a_response_alike():
    x = tokens([0.5, 9.0, -0.5, 0.1], [0.05, 0.05, 0.05, -0.05], mask=[1, 0, 1, 1], offsets=[0, 3, 4])
    policy = dpo(x, OPTIONS)
    assert slopes(policy, x, [0.5, 0.0, 0.5, 1.0]) == pytest.approx([-0.1, 0.0, -0.1, 0.1])


def test_sppo_has_no_gradient_where_the_log_ratio_is_the_win_rate():
    x = tokens([0.3, 0.1], [0.2, 0.2], ref_logprobs=torch.full((2,), -9.0).double())  # no matter
    assert sppo(x, LossOptions(sppo_eta=2.0)).loss.tolist() == pytest.approx([0.0, 0.0])
    assert sppo(x, LossOptions(sppo_eta=1.0)).loss.tolist() == pytest.approx([0.04, 0.04])


@pytest.mark.parametrize(("name", "lacks"), [("clip_cov", "prepass"), ("kl_cov", "prepass")])
def test_a_loss_that_lacks_something_says_what(name, lacks):
    with pytest.raises(ValueError, match=lacks):
        LOSSES[name](tokens([0.0], [1.0]), OPTIONS)
