import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.losses import vanilla

pytestmark = pytest.mark.unit

CLIP = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0}


def one(log_ratio, advantage):
    logprobs = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    return logprobs, vanilla(logprobs, zero, torch.tensor([advantage], dtype=torch.float64), **CLIP)


@given(st.floats(-25, 25), st.floats(-5, 5))
@settings(max_examples=200, deadline=None)
def test_vanilla_is_its_formula(log_ratio, advantage):
    ratio = math.exp(max(-20.0, min(20.0, log_ratio)))
    expected = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3))
    if advantage < 0:
        expected = min(expected, -advantage * 3.0)
    assert one(log_ratio, advantage)[1].loss.item() == pytest.approx(expected, rel=1e-9)


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
def test_a_clip_is_reported_exactly_where_it_takes_the_gradient(log_ratio, advantage, clip):
    logprobs, policy = one(log_ratio, advantage)
    policy.loss.sum().backward()
    named = {name for name in ("clipped_high", "clipped_low", "clipped_dual") if getattr(policy, name).item()}
    assert named == ({clip} if clip else set())
    assert (logprobs.grad.item() == 0.0) == (clip is not None)


def test_kl_is_old_minus_new_and_carries_no_gradient():
    _, policy = one(0.25, 1.0)
    assert policy.kl.item() == -0.25
    assert not policy.kl.requires_grad
