"""Form alone: sections in tags, such as `<think>...</think><answer>...</answer>`, or a regular expression.

It knows nothing of what is right, so it is a part of a reward and not one by itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl.errors import RewardError

__all__ = ["compute_score", "sections_in_order"]


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
    """1.0 when the whole answer is the sections `tags`, in order, each once and filled; or matches `pattern`, if given.

    Else `partial` times the share of the sections that are there once, closed and in order. `prefix` is what the chat
    template has written already, such as `<think>`. The ground truth is not looked at.
    """
    text = (prefix + solution_str).strip()
    if pattern is not None:
        try:
            well_formed = re.fullmatch(pattern, text, re.DOTALL) is not None
        except re.error as error:
            raise RewardError(f"format: pattern={pattern!r} is not a regular expression ({error}); mend it") from None
        return {"score": float(well_formed), "well_formed": float(well_formed)}
    found, outside = sections_in_order(text, tags)
    well_formed = found == len(tags) and not outside
    return {"score": 1.0 if well_formed else partial * found / len(tags), "well_formed": float(well_formed)}


def sections_in_order(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """How many sections are there once, filled, and after the one before; and the text outside of them.

    >>> sections_in_order("<think>2 + 2</think> so <answer>4</answer>", ("think", "answer"))
    (2, 'so')
    """
    place, found, outside = 0, 0, ""
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        start, end = text.find(opening, place), text.find(closing, place)
        once = text.count(opening) == text.count(closing) == 1
        if once and 0 <= start < end and text[start + len(opening) : end].strip():
            outside += text[place:start]
            place = end + len(closing)
            found += 1
    return found, (outside + text[place:]).strip()
