"""Short answers: normalization, exact match, F1, several ground truths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.rewards.scorers.qa import compute_score, exact_match, f1, normalize

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]

TEXT = st.text(min_size=1).filter(str.strip)


@pytest.mark.parametrize("text", ["Beatles", "the Beatles", " The  BEATLES! ", "(a) Beatles", "'Beatles'."])
def test_case_whitespace_articles_and_punctuation_do_not_matter(text: str) -> None:
    assert compute_score("nq", f"<answer>{text}</answer>", "The Beatles")["score"] == 1.0


@pytest.mark.parametrize(
    ("answer", "truth"), [("-5", "5"), ("1.5", "15"), ("3/4", "34"), (".5", "5"), ("-.5", ".5"), ("12:30", "1230")]
)
def test_signs_and_points_of_numbers_matter(answer: str, truth: str) -> None:
    assert compute_score("nq", f"<answer>{answer}</answer>", truth)["score"] == 0.0
    assert (
        compute_score("nq", f"<answer>({answer}).</answer>".replace("(-", "-").replace("(.", "."), answer)["score"]
        == 1.0
    )
    assert normalize("10,000") == "10000"


@given(TEXT)
def test_the_truth_itself_is_right_and_nothing_is_wrong(truth: str) -> None:
    assert exact_match(truth, truth) == 1.0
    assert f1(truth, truth) == (1.0 if normalize(truth).split() else 0.0)
    assert exact_match("", truth) == f1("", truth) == 0.0


@given(st.text(), st.text())
def test_f1_is_symmetric_bounded_and_one_for_every_exact_match_with_words(one: str, other: str) -> None:
    assert 0.0 <= f1(one, other) == f1(other, one) <= 1.0
    if exact_match(one, other) and normalize(one).split():
        assert f1(one, other) == 1.0


@given(st.lists(TEXT, min_size=1, max_size=4), st.text())
def test_several_truths_give_the_best_of_each(truths: list[str], answer: str) -> None:
    single = [compute_score("nq", answer, truth, metric="f1") for truth in truths]
    best = {key: max(result[key] for result in single) for key in ("score", "acc", "f1")}
    for several in (truths, tuple(truths), np.array(truths, dtype=object), {"target": truths}):
        assert compute_score("nq", answer, several, metric="f1") == best


def test_the_last_answer_counts_and_a_list_of_guesses_loses() -> None:
    assert compute_score("nq", "<answer>Paris</answer> no <answer>Rome</answer>", "Paris")["score"] == 0.0
    assert compute_score("nq", "<answer>Paris</answer> no <answer>Rome", "Rome")["score"] == 1.0
    guesses = compute_score("nq", "London Paris Rome Berlin Madrid", "Paris", metric="f1")
    assert guesses == {"score": pytest.approx(1 / 3), "acc": 0.0, "f1": pytest.approx(1 / 3)}


def test_an_empty_response_does_not_match_a_ground_truth_of_articles() -> None:
    assert compute_score("nq", "", "The The")["score"] == 0.0
    assert compute_score("nq", "a", "A")["score"] == 1.0
    assert compute_score("nq", "the", "A")["score"] == 0.0


@pytest.mark.parametrize("truth", ["", " ", [], ["Paris", ""], {"target": []}])
def test_a_ground_truth_without_text_is_an_error(truth: object) -> None:
    with pytest.raises(RewardError, match="ground_truth to the answer, or to a list of answers"):
        compute_score("nq", "Paris", truth)


def test_an_unknown_metric_is_an_error() -> None:
    with pytest.raises(RewardError, match="choose 'exact' or 'f1'"):
        compute_score("nq", "Paris", "Paris", metric="bleu")  # type: ignore[arg-type]
