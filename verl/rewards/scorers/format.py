"""Format only: sections in tags, such as `<think>...</think><answer>...</answer>`, or a regular expression.

It does not check correctness, so it is meant as one part of a reward.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl.errors import RewardError


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    tags: Sequence[str] = ("think", "answer"),
    prefix: str = "",
    pattern: str | None = None,
    partial: float = 0.0,
) -> dict[str, float]:
    """Return 1.0 if the response is exactly the sections `tags`, in order and not empty, or matches `pattern` if given.

    Otherwise return `partial` times the fraction of sections that occur once, closed and in order. `prefix` is text
    that the chat template already wrote, such as `<think>`. The ground truth is not used.
    """
    text = (prefix + solution_str).strip()
    if pattern is not None:
        try:
            well_formed = re.fullmatch(pattern, text, re.DOTALL) is not None
        except re.error as error:
            raise RewardError(f"format: pattern={pattern!r} is not a regular expression ({error}); fix it") from None
        return {"score": float(well_formed), "well_formed": float(well_formed)}
    count, outside = count_sections(text, tags)
    well_formed = count == len(tags) and not outside
    return {"score": 1.0 if well_formed else partial * count / len(tags), "well_formed": float(well_formed)}


def count_sections(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """Return how many sections occur once, not empty, and after the previous one; and the text outside of them."""
    position, count, outside = 0, 0, ""
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        start, end = text.find(opening, position), text.find(closing, position)
        is_unique = text.count(opening) == text.count(closing) == 1
        if is_unique and 0 <= start < end and text[start + len(opening) : end].strip():
            outside += text[position:start]
            position = end + len(closing)
            count += 1
    return count, (outside + text[position:]).strip()
