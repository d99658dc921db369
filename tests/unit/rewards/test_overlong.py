"""Overlong shaping: nothing before the buffer, a straight line within it, and no more than the factor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.rewards.settings import OverlongPenalty

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (80, 0.0), (81, -0.1), (85, -0.5), (90, -1.0), (100, -2.0), (101, -2.0), (500, -2.0)],
)
def test_the_penalty_grows_linearly_over_the_buffer(length: int, expected: float) -> None:
    assert OverlongPenalty(buffer=20, factor=2.0, max_length=100).compute(length) == pytest.approx(expected)


@given(st.integers(0, 200), st.integers(1, 100), st.data(), st.floats(0, 10))
def test_the_penalty_never_falls_with_length_and_is_at_most_the_factor(
    length: int, max_length: int, data: st.DataObject, factor: float
) -> None:
    buffer = data.draw(st.integers(0, max_length))
    penalty = OverlongPenalty(buffer, factor, max_length)
    assert -factor <= penalty.compute(length + 1) <= penalty.compute(length) <= 0


def test_an_empty_buffer_gives_no_penalty() -> None:
    assert OverlongPenalty(buffer=0, factor=1.0, max_length=100).compute(200) == 0.0
