"""Multiple choice: which letter an answer settles on."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.rewards.scorers.multiple_choice import LETTERS, compute_score, final_choice

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    "text",
    [
        "B",
        "(B)",
        " b. ",
        "**B**",
        "B) Paris",
        "The answer is (B)",
        "The answer is: B.",
        "the answer is b",
        "The answer is (b) Paris",
        "the correct option is B, since the others are wrong",
        "Answer: B",
        "**Answer:** B",
        "**Answer**: (B) Paris",
        "Answer:\nB",
        "the answer is option B.",
        "Thus \\boxed{B}.",
        "Thus $\\boxed{\\text{(B)}}$.",
        "<think>the answer is A</think><answer> B </answer>",
        "It is A? No: the answer is B. I hope that this answer is helpful.",
        "The answer is not A. The answer is B because A is wrong.",
        "Let us see.\nA is wrong.\n\nB",
        "A) London\nB) Paris\nThe answer is B",
    ],
)
def test_the_chosen_letter_is_found(text: str) -> None:
    assert final_choice(text) == "B"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris",
        "A, B, C, D",
        "A B C D",
        "A) London B) Paris C) Rome",
        "A) London\nB) Paris\nC) Rome",
        "A\nB\nC\nD",
        "The answer is A, B, C or D",
        "The answer is (A) or (B)",
        "The answer is A/B",
        "\\boxed{A, B}",
        "\\boxed{ABCD}",
        "<answer>A and B</answer>",
        "The answer is B. On second thought, the answer is A or B.",
        "The answer is a matter of taste",
        "The answer is I think unclear",
        "Answer: K",
        "The answer is Bordeaux",
    ],
)
def test_ambiguous_responses_choose_nothing(text: str) -> None:
    assert final_choice(text) is None


@given(st.permutations("ABCD"), st.sampled_from(["The answer is ({}). ", "Answer: {}\n", "\\boxed{{{}}} "]))
def test_only_the_last_of_many_statements_counts(letters: list[str], statement: str) -> None:
    text = "".join(statement.format(letter) for letter in letters)
    assert [compute_score("mmlu", text, letter) for letter in letters] == [0.0, 0.0, 0.0, 1.0]


@given(st.lists(st.sampled_from(LETTERS), min_size=2, unique=True), st.sampled_from([", ", " or ", " and ", "/", " "]))
def test_naming_several_letters_never_scores(letters: list[str], separator: str) -> None:
    named = separator.join(letters)
    for text in (named, f"The answer is {named}.", f"\\boxed{{{named}}}", f"<answer>{named}</answer>"):
        assert all(compute_score("mmlu", text, letter) == 0.0 for letter in letters)


@given(st.text(max_size=200))
def test_any_text_gets_a_score(text: str) -> None:
    assert compute_score("mmlu", text, "A") in (0.0, 1.0)
    assert compute_score("mmlu", f"{text}\nThe answer is (C)", "(c)") == 1.0


def test_ground_truths_are_letters_or_indices_within_the_letters_of_the_row() -> None:
    assert compute_score("mmlu", "The answer is C", 2) == 1.0
    assert compute_score("mmlu", "The answer is E", "D", letters="ABCD") == 0.0
    for truth in ("E", "AB", "", 4, "Paris"):
        with pytest.raises(RewardError, match="to one of the letters ABCD, or an index from 0 to 3"):
            compute_score("mmlu", "The answer is E", truth, letters="ABCD")


@pytest.mark.parametrize(
    "text", ["answer " * 50_000, "answer is " * 5_000, "*" * 100_000, "\\boxed{" * 5_000, "A) " * 50_000]
)
def test_long_nonsense_is_read_quickly(text: str) -> None:
    start = time.process_time()
    assert final_choice(text) is None
    assert time.process_time() - start < 3
