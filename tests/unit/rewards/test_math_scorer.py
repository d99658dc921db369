"""MATH: which box counts, what is equal, and that no answer is a silent 0 or an endless computation."""

from __future__ import annotations

import builtins
import logging
import signal
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.rewards.scorers import math as scorer
from verl.rewards.scorers.math import compute_score, last_boxed

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]


def score(answer: str, truth: object) -> float:
    return compute_score("math", f"so \\boxed{{{answer}}}.", truth)["score"]


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("\\boxed{5}", "5"),
        ("\\boxed{1} no: \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\fbox{5}", "5"),
        ("\\boxed{\\left\\{ 1, 2 \\right.}", "\\left\\{ 1, 2 \\right."),
        ("\\boxed{x = \\boxed{5}}", "5"),
        ("\\boxed{}", ""),
        ("5", None),
        ("\\boxed{5", None),
        ("\\boxed{4} and \\boxed{5", None),
        ("", None),
    ],
)
def test_the_last_box_counts(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@given(st.lists(st.text(st.characters(exclude_characters="\\{}")), min_size=1))
def test_earlier_boxes_are_ignored(contents: list[str]) -> None:
    assert last_boxed(" and ".join(f"\\boxed{{{content}}}" for content in contents)) == contents[-1]


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("5", "5"),
        ("5", 5),
        ("5", "$5$"),
        ("5", "We get $\\boxed{5}$."),
        ("1,250", "1250"),
        ("\\$1{,}250", "1250"),
        ("0.5", "\\frac{1}{2}"),
        ("\\frac 1 2", "0.5"),
        ("0.5", "\\dfrac 1 2"),
        ("3x^2", "x^2 3"),
        ("12\\text{ ml}", "12\\text{ cm}^3"),
        ("90\\text{ mi/h}", "90\\text{ mph}"),
        ("90\\text{ km/h}", "90\\text{ kph}"),
        ("\\dfrac12", "\\frac{1}{2}"),
        ("2\\frac{1}{2}", "\\frac52"),
        ("x = 5", "5"),
        ("2,1,3", "1,2,3"),
        ("\\{1,2\\}", "1,2"),
        ("[1, \\infty)", "[1,\\infty)"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{bmatrix} 1 \\\\ 2 \\end{bmatrix}"),
        ("5\\text{ cm}", "5"),
        ("5\\text{ cm}", "5 \\text{ centimeters}"),
        ("5\\text{ cm}^2", "5 \\text{ square centimeters}"),
        ("90 \\text{ km/h}", "90 \\text{ kilometers per hour}"),
        ("5 \\text{ apples}", "5 \\text{ fruits}"),
        ("1 000", "1000"),
        ("1\\,234\\,567", "1234567"),
        ("1000", "1~000"),
        ("\\text{(A)}", "A"),
        ("\\text{Evelyn}", "Evelyn"),
        ("2\\sqrt2", "\\sqrt{8}"),
        ("(x+1)^2", "x^2+2x+1"),
        ("1024", "2^{10}"),
        ("\\frac{\\sqrt2}{2}", "\\frac{1}{\\sqrt{2}}"),
        ("y=2x+3", "y = 2x + 3"),
        ("2016^{2016}", "2016^{2016} "),
        ("50\\%", "50"),
        ("50", "50\\%"),
        ("50\\%", "\\frac12"),
        ("0.125", "12.5\\%"),
        ("12.50\\%", "12.5\\%"),
        ("1.1 \\times 3 = 3.3", "3.3"),
        ("\\frac{1}{3} = 0.3333333", "\\frac13"),
        ("x = \\frac{y-1}{2}", "y = 2x+1"),
    ],
)
def test_equal_answers_score_one(answer: str, truth: object) -> None:
    assert score(answer, truth) == 1.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("5", "6"),
        ("", "5"),
        ("1,2,3", "3"),
        ("3 \\text{ or } 4", "3"),
        ("5 m", "5 cm"),
        ("5\\text{ m}", "5\\text{ cm}"),
        ("5 \\mathrm{kg}", "5 \\mathrm{km}"),
        ("10\\text{ cm}", "10\\text{ cm}^2"),
        ("6 minutes", "6 hours"),
        ("1 000", "0"),
        ("1\\,000", "0"),
        ("5 00", "0"),
        ("10 20", "30"),
        ("2 \\pm 1", "3"),
        ("1=2=3=4", "3"),
        ("[1,2]", "(1,2)"),
        ("\\mathbb{R}", "5"),
        ("x", "5"),
        ("\\frac{0}{0}", "0"),
        ("\\text{A, B, C, D}", "B"),
        ("5000\\%", "50\\%"),
        ("5000\\%", "0.5"),
        ("x > 3", "x \\neq 3"),
        ("1<x<2<3", "1<x<2"),
        ("#### 5", "5"),
        ("\\sum_{k=1}^{100} k", "5050"),
        ("\\int_0^1 2x dx", "1"),
        ("\\lim_{x\\to 0} \\frac{\\sin x}{x}", "1"),
        ("5 \\bmod 0 = x", "5"),
        ("(x+1)^2 = x^2+2x+7", "5"),
    ],
)
def test_wrong_and_unevaluated_answers_score_zero(answer: str, truth: str) -> None:
    assert score(answer, truth) == 0.0


def test_the_truth_in_an_earlier_box_or_outside_of_one_earns_nothing() -> None:
    assert compute_score("math", "\\boxed{5} or rather \\boxed{6}", "5")["score"] == 0.0
    assert compute_score("math", "The final answer is $5$.", "5") == {
        "score": 0.0,
        "acc": 0.0,
        "parsed": 0.0,
        "undecided": 0.0,
    }


@settings(max_examples=20, deadline=None)
@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6))
def test_a_fraction_equals_its_other_forms_and_no_other_fraction(above: int, below: int) -> None:
    assert score(f"\\frac{{{2 * above}}}{{{2 * below}}}", f"{above}/{below}") == 1.0
    assert score(f"\\frac{{{above + below}}}{{{below}}}", f"{above}/{below}") == 0.0


@settings(max_examples=20, deadline=None)
@given(st.text(st.sampled_from("0123456789+-^_{}()[]\\,.!|=<>%$&xi fracsqt"), max_size=12))
def test_no_text_in_the_box_raises(text: str) -> None:
    assert compute_score("math", f"\\boxed{{{text}}}", "\\sqrt{2}")["score"] in (0.0, 1.0)


@pytest.mark.parametrize(
    "answer",
    [
        "10^{10^{10}}",
        "2^{999999999}",
        "(10^{10})!",
        "9!!!",
        "\\binom{1000000000}{500000000}",
        "\\gcd(10^{10^{9}}, 6)",
        "\\sqrt[10^{10}]{10^{10^{10}}}",
        "\\prod_{k=1}^{1000000} k",
        "(x+y+z)^{500}",
        "(x+1)^{100000}",
        "e^{10^{10}}",
        "4" * 100_000,
        "(" * 400 + "4" + ")" * 400,
        "1+" * 900 + "1",
        "-" * 201 + "42",
        "{" * 3_000 + "}" * 3_000,
    ],
)
def test_an_expression_that_would_take_forever_is_not_evaluated(answer: str) -> None:
    start = time.process_time()
    assert score(answer, "42") == 0.0
    assert time.process_time() - start < 5


@pytest.mark.parametrize("answer", ["4 = 5", "1=2=5", "x=4=5", "4 \\equiv 5", "2+2=5", "x+1=x+2=5"])
def test_a_contradiction_is_wrong(answer: str) -> None:
    assert score(answer, "5") == 0.0
    assert score("x = 5", "5") == score("2+3=5", "5") == score("x=y=5", "5") == 1.0


def test_numbers_of_other_bases_differ() -> None:
    assert [score("10_{2}", "10"), score("10_3", "10_2"), score("10_{2}", "10_2"), score("10", "10_2")] == [0, 0, 1, 1]


@pytest.mark.parametrize("truth", ["x=5", "(1,2)"])
def test_a_slow_answer_is_wrong_and_not_a_timeout(truth: str) -> None:
    slow = "\\sin(\\cos(\\tan(\\sin(\\cos(\\tan 1)))))"
    assert score(f"({slow},2)" if "," in truth else slow, truth) == 0.0


def test_an_answer_that_takes_too_long_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: Any) -> bool:
        while True:
            pass

    assert compute_score("math", "\\boxed{\\sqrt{4}}", "2")["score"] == 1.0
    monkeypatch.setattr(scorer, "MAX_CPU_S", 0.1)
    monkeypatch.setattr(scorer, "_are_equal", compare)
    result = compute_score("math", "\\boxed{\\sqrt{4}}", "2")
    assert (result["score"], result["undecided"]) == (0.0, 1.0)


@pytest.mark.parametrize("truth", ["", "\\frac{", "0/0", "10^{10^{10}}", "see the figure: $?!$", "5" * 3_000])
def test_a_ground_truth_that_cannot_be_parsed_is_an_error(truth: str) -> None:
    with pytest.raises(
        RewardError, match=r"data_source 'math': math-verify cannot parse the ground truth .*remove the row"
    ):
        score("5", truth)


def test_an_answer_equal_to_the_ground_truth_as_text_needs_no_library() -> None:
    assert score("x \\mapsto", "x \\mapsto") == 1.0


def test_pairs_that_the_library_fails_to_compare_are_counted() -> None:
    assert compute_score("math", "\\boxed{x > 3}", "x \\neq 3")["undecided"] == 1.0
    assert compute_score("math", "\\boxed{4}", "5")["undecided"] == 0.0


def test_it_works_in_any_thread_and_touches_no_signal(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def no_signal(*_: object) -> None:
        raise AssertionError("a signal was set")

    monkeypatch.setattr(signal, "signal", no_signal)
    monkeypatch.setattr(signal, "alarm", no_signal)
    scores: list[float] = []
    with caplog.at_level(logging.WARNING):
        threads = [threading.Thread(target=lambda n=n: scores.append(score(f"{n}+1", str(n + 1)))) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        scores.append(score("3+4", "7"))
    assert scores == [1.0] * 5
    assert caplog.records == []


def test_without_the_library_the_message_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "math_verify":
            raise ModuleNotFoundError("No module named 'math_verify'")
        return real(name, *args, **kwargs)

    scorer._math_verify.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RewardError, match=r'pip install -e "\.\[math\]"'):
        score("31+1", "32")
