"""Form: sections in tags, regular expressions, and what part of a form is worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.rewards.scorers.format import compute_score, count_sections

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]

PLAIN = st.text(st.characters(exclude_characters="<>"), min_size=1).filter(str.strip)


@given(PLAIN, PLAIN)
def test_sections_that_occur_once_in_order_and_filled_match_the_format(thought: str, answer: str) -> None:
    text = f" <think>{thought}</think>\n<answer>{answer}</answer>\n"
    assert compute_score("form", text, None) == {"score": 1.0, "well_formed": 1.0}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("4", 0),
        ("<think>a</think>", 1),
        ("<answer>4</answer>", 1),
        ("<think>a</think><answer>4", 1),
        ("<think>a</think><answer> </answer>", 1),
        ("<answer>4</answer><think>a</think>", 1),
        ("<think>a</think><answer>4</answer><answer>4</answer>", 1),
        ("<think>a</think><think>b</think><answer>4</answer>", 1),
        ("so <think>a</think><answer>4</answer>", 2),
        ("<think>a</think><answer>4</answer>!", 2),
        ("<think>a<answer>4</answer></think>", 1),
        ("<think></think><answer></answer>" * 9, 0),
    ],
)
def test_a_partly_right_format_gets_a_partial_score(text: str, count: int) -> None:
    assert compute_score("form", text, None)["score"] == 0.0
    assert compute_score("form", text, None, partial=0.5) == {"score": 0.5 * count / 2, "well_formed": 0.0}


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " "]), max_size=12).map("".join))
def test_a_partial_score_never_exceeds_the_full_score(text: str) -> None:
    result = compute_score("form", text, None, partial=0.4)
    assert result["score"] == 1.0 if result["well_formed"] else result["score"] <= 0.4


def test_text_that_the_chat_template_wrote_counts() -> None:
    assert compute_score("form", "a</think><answer>4</answer>", None)["well_formed"] == 0.0
    assert compute_score("form", "a</think><answer>4</answer>", None, prefix="<think>\n")["well_formed"] == 1.0


def test_tags_and_patterns_can_be_set() -> None:
    assert count_sections("<plan>x</plan>", ("plan",)) == (1, "")
    assert compute_score("form", "Answer: 4\n", None, pattern=r"Answer: \d+")["score"] == 1.0
    assert compute_score("form", "Answer: 4 or 5", None, pattern=r"Answer: \d+")["score"] == 0.0
    with pytest.raises(RewardError, match=r"pattern='\(' is not a regular expression"):
        compute_score("form", "x", None, pattern="(")
