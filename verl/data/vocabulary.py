"""Comparison of the vocabularies of two models that read the same tokens."""

from __future__ import annotations

from collections.abc import Mapping


def describe_vocabulary_gap(student: Mapping[str, int], teacher: Mapping[str, int], size: int) -> str | None:
    """Return how the tokens of a student differ from a teacher's, whose model knows ids below `size`; None if equal.

    The teacher may have more tokens than the student, which never generates them.

    >>> describe_vocabulary_gap({"a": 0, "b": 1}, {"a": 0, "b": 1, "<think>": 2}, size=8)
    """
    tokens = {index: token for token, index in teacher.items()}
    differing = sorted(index for token, index in student.items() if tokens.get(index) != token or index >= size)
    if not differing:
        return None
    first = differing[0]
    [mine] = [token for token, index in student.items() if index == first]
    other = repr(tokens[first]) if first in tokens else "no token"
    other = f"beyond its {size:,} embeddings" if first >= size else other
    return (
        f"its vocabulary is not the policy's: {len(differing):,} of {len(student):,} tokens differ; id {first} is "
        f"{mine!r} for the policy, and {other} for the teacher. The teacher reads the policy's tokens as they are; "
        "set it to a model with the policy's tokenizer, usually of the same family"
    )
