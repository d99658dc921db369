"""The share of a response that repeats itself, against a count of all pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.workers.repetition import measure_repetition

pytestmark = pytest.mark.unit


def measure(*parts: tuple[list[int], bool]) -> float:
    """Measure a sample of parts that the model generated (True) or not."""
    tokens = np.array([token for part, _ in parts for token in part], np.int32)
    return measure_repetition(tokens, np.repeat([own for _, own in parts], [len(part) for part, _ in parts]))


@given(st.lists(st.integers(0, 2), min_size=64, max_size=200))
def test_every_piece_that_occurred_before_counts(tokens: list[int]) -> None:
    pieces = [tuple(tokens[k : k + 8]) for k in range(len(tokens) - 7)]
    assert measure(([5] * 9, False), (tokens, True)) == pytest.approx(1 - len(set(pieces)) / len(pieces))


def test_a_loop_repeats_itself_and_different_tokens_do_not() -> None:
    assert measure((list(range(64)), True)) == 0.0
    assert measure(([1, 2, 3] * 100, True)) > 0.98
    assert measure(([1, 2, 3] * 21, True)) == 0.0  # too short


def test_turns_that_begin_alike_do_not_repeat_themselves() -> None:
    turn = (list(range(40)), True)
    assert measure(turn, ([7, 8], False), turn) == 0.0
    assert measure(([1] * 40, True), ([7], False), turn) == pytest.approx(32 / 66)


def test_a_response_without_tokens_has_none_to_repeat() -> None:
    assert measure(([1, 2], False)) == 0.0
