"""mean@n, pass@k and maj@n: against counting, and their intervals."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.rewards.final_answer import extract_final_answer
from verl.rewards.score_statistics import (
    ScoredResponses,
    bootstrap,
    majority_score,
    pass_at_k,
    summarize,
)

pytestmark = pytest.mark.unit


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_correct_response(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    draws = list(combinations(right, k))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.integers(1, 200), st.data())
def test_pass_at_k_rises_with_k_and_begins_at_the_mean(answers: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, answers))
    curve = [pass_at_k(answers, right, k) for k in range(1, answers + 1)]
    assert curve[0] == pytest.approx(right / answers)
    assert curve == sorted(curve)
    assert curve[-1] == (right > 0)


def test_k_must_not_exceed_the_responses() -> None:
    with pytest.raises(ValueError, match="pass@3 of 1 correct among 2 responses"):
        pass_at_k(2, 1, 3)


def test_the_most_frequent_answer_counts() -> None:
    texts = ["#### 4", r"\boxed{5}", "so it is #### 4.0", "#### 3"]
    assert majority_score([*map(extract_final_answer, texts)], [1.0, 0.0, 1.0, 0.0]) == 1.0
    assert majority_score(["4", "5"], [1.0, 0.0]) == 0.5
    assert majority_score([*map(extract_final_answer, ["Paris.", "paris", "Rome"])], [1.0, 1.0, 0.0]) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [("#### 1,250", "1250"), ("####  -3.50", "-3.5"), (r"\boxed{ x + 1 }", "x + 1"), (" It is Paris! ", "it is paris")],
)
def test_final_answers_are_normalized(text: str, answer: str) -> None:
    assert extract_final_answer(text) == answer


def test_an_interval_holds_the_mean_and_narrows_with_the_prompts() -> None:
    few, many = (bootstrap([0.0, 1.0] * count) for count in (5, 500))
    assert few.low <= few.value <= few.high
    assert many.high - many.low < few.high - few.low
    assert bootstrap([0.0, 1.0] * 5) == few, "the same seed, the same draws"


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    random = np.random.default_rng(0)
    truth, held = 0.3, 0
    for trial in range(200):
        found = bootstrap((random.random(100) < truth).astype(float).tolist(), draws=200, seed=trial)
        held += found.low <= truth <= found.high
    assert 0.88 <= held / 200 <= 0.99


def test_a_summary_has_every_metric_and_skips_what_was_not_scored() -> None:
    prompts = [
        ScoredResponses(["a"] * 4, [1.0, 0.0, 0.0, 0.0]),
        ScoredResponses(["b"] * 2, [1.0, 1.0]),
        ScoredResponses([], []),
    ]
    found = summarize(prompts, threshold=0.5)
    assert list(found) == ["mean@4", "pass@1", "pass@2", "pass@4", "maj@4"]
    assert found["mean@4"].value == pytest.approx((0.25 + 1.0) / 2)
    assert (found["pass@2"].value, found["pass@2"].prompts) == (pytest.approx((0.5 + 1.0) / 2), 2)
    assert (found["pass@4"].value, found["pass@4"].prompts) == (1.0, 1)
    assert list(summarize(prompts, threshold=0.5, ks=[3])) == ["mean@4", "pass@3", "maj@4"]
    assert summarize([], threshold=0.5) == {}
