"""The vocabularies of a student and its teacher."""

from __future__ import annotations

import pytest

from verl.data.chat import describe_vocabulary_gap

pytestmark = pytest.mark.unit

STUDENT = {"a": 0, "b": 1, "<end>": 2}


def test_a_teacher_may_have_more_tokens_and_padding() -> None:
    assert describe_vocabulary_gap(STUDENT, STUDENT, 3) is None
    assert describe_vocabulary_gap(STUDENT, {**STUDENT, "<think>": 3}, 64) is None


@pytest.mark.parametrize(
    ("teacher", "size", "says"),
    [
        ({"a": 1, "b": 0, "<end>": 2}, 3, "2 of 3 tokens differ; id 0 is 'a' for the policy, and 'b' for the teacher"),
        ({"a": 0, "b": 1}, 3, "1 of 3 tokens differ; id 2 is '<end>' for the policy, and no token for the teacher"),
        (STUDENT, 2, "id 2 is '<end>' for the policy, and beyond its 2 embeddings for the teacher"),
    ],
)
def test_the_first_token_that_differs_is_named(teacher: dict[str, int], size: int, says: str) -> None:
    gap = describe_vocabulary_gap(STUDENT, teacher, size)
    assert gap is not None
    assert says in gap
