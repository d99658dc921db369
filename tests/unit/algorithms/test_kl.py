import math

import pytest
import torch

from verl.algorithms.losses import KL_KINDS, kl_penalty

pytestmark = pytest.mark.unit

LP = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
REF = torch.tensor([-1.5, -0.7, -0.5], dtype=torch.float64)
FORMULAS = {
    "k1": lambda x: -x,
    "abs": abs,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(x) - x - 1,
}


@pytest.mark.parametrize("kind", KL_KINDS)
def test_each_estimator_is_its_formula(kind):
    expected = [FORMULAS[KL_KINDS[kind]](float(ref - lp)) for lp, ref in zip(LP, REF, strict=True)]
    assert kl_penalty(LP, REF, kind).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_plus_takes_the_value_forward_and_the_slope_of_k2_backward(kind):
    logprobs = LP.clone().requires_grad_()
    value = kl_penalty(logprobs, REF, f"{kind}+")
    value.sum().backward()
    assert value.tolist() == pytest.approx(kl_penalty(LP, REF, kind).tolist())
    assert logprobs.grad.tolist() == pytest.approx((LP - REF).tolist())


def test_k3_is_clamped_far_from_the_reference():
    assert kl_penalty(torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0]), "k3").tolist() == [10.0, 10.0]


def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(ValueError, match="'k4' is not one of kl, k1"):
        kl_penalty(LP, REF, "k4")
