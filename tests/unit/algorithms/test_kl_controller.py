import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.settings import KlController

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.1, 1.0), (0.11, 1.01), (0.05, 0.98), (5.0, 1.02), (0.0, 0.98)],
)
def test_the_weight_follows_the_error_clamped_to_a_fifth(kl, factor):
    controller = KlController(beta=0.5, adaptive=True, target=0.1, horizon=1000)
    assert controller.after(kl, samples=100).beta == pytest.approx(0.5 * factor)


def test_a_constant_coefficient_does_not_change():
    assert KlController(beta=0.5).after(9.0, samples=100) == KlController(beta=0.5)


@given(st.floats(0, 10), st.integers(1, 1000))
def test_high_kl_raises_the_coefficient_and_low_kl_lowers_it(kl, samples):
    after = KlController(beta=1.0, adaptive=True, target=0.1, horizon=1e4).after(kl, samples).beta
    assert (after - 1.0) * (kl - 0.1) >= 0
