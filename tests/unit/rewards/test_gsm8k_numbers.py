"""GSM8K: which number counts, and what is not a number."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.rewards.scorers.gsm8k import compute_score, final_number

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", "18"),
        ("####18.", "18"),
        ("#### 18 dollars", "18"),
        ("#### 18%", "18"),
        ("#### $1,250.50", "1250.50"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### −5", "-5"),
        ("#### **18**", "18"),
        ("####\n.5", "0.5"),
        ("#### 18 ####", "18"),
        ("#### 17\nNo.\n#### 18", "18"),
    ],
)
def test_the_number_after_the_last_mark_counts(text: str, number: str) -> None:
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize(
    "text",
    [
        *("18", "", "####", "#### x", "#### 18/2", "#### 17-19", "#### 1,2,3", "#### 9 * 2", "#### 2e3", "#### 1.2.3"),
        *("#### 18 million", "#### 18²", "#### 18 19", "#### 18 or 19", "#### 17 to $19", "#### 18|19", "#### 18½"),
    ],
)
def test_anything_but_one_number_after_the_mark_is_not_an_answer(text: str) -> None:
    assert final_number(text) is None


@given(st.integers(-(10**12), 10**12), st.text(st.characters(exclude_characters="#"), max_size=40))
def test_every_way_to_write_the_truth_is_right_and_every_other_number_is_wrong(number: int, before: str) -> None:
    for written in (f"{number}", f"{number:,}", f"{number}.0"):
        assert compute_score("gsm8k", f"{before}#### {written}", f"so\n#### {number:,}") == 1.0
        assert compute_score("gsm8k", f"{before}#### {written}", number + 1) == 0.0


@given(st.lists(st.integers(0, 99), min_size=2, unique=True))
def test_the_truth_among_other_numbers_earns_nothing_unless_it_is_the_last(numbers: list[int]) -> None:
    guesses = "\n".join(f"#### {number}" for number in numbers)
    assert [compute_score("gsm8k", guesses, number) for number in numbers] == [0.0] * (len(numbers) - 1) + [1.0]


@pytest.mark.parametrize(
    "text", ["####" + " " * 1_000_000, "#" * 1_000_000, "####" + "," * 500_000, "#### " + "9" * 99_999]
)
def test_long_nonsense_is_read_quickly(text: str) -> None:
    start = time.process_time()
    assert compute_score("gsm8k", text, "18") == 0.0
    assert time.process_time() - start < 2


@pytest.mark.parametrize("truth", ["", "eighteen", "nan", None, "3/4"])
def test_a_ground_truth_without_a_number_is_an_error(truth: object) -> None:
    with pytest.raises(RewardError, match=r"has no number; set reward_model.ground_truth to a number"):
        compute_score("gsm8k", "#### 18", truth)
