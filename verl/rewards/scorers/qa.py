"""Questions with short answers: exact match and F1 over words, after the usual normalisation of SQuAD.

What stands in the last `<answer>...</answer>` counts, or the whole answer where there is none.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any, Literal

from verl.errors import RewardError

__all__ = ["compute_score", "exact_match", "f1", "normalise"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Small letters without punctuation, articles and extra blanks; the plain text where nothing would be left.

    >>> normalise("The  Beatles!"), normalise("A")
    ('beatles', 'a')
    """
    small = " ".join(text.lower().split())
    return " ".join(_ARTICLES.sub(" ", small.translate(_PUNCTUATION)).split()) or small


def exact_match(answer: str, truth: str) -> float:
    """1.0 when both are the same after normalisation."""
    return float(normalise(answer) == normalise(truth))


def f1(answer: str, truth: str) -> float:
    """The harmonic mean of the share of the answer's words that are right, and of the truth's words that are there.

    >>> f1("in Paris, France", "Paris")
    0.5
    """
    given, expected = normalise(answer).split(), normalise(truth).split()
    common = (Counter(given) & Counter(expected)).total()
    return 2 * common / (len(given) + len(expected)) if common else 0.0


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    metric: Literal["exact", "f1"] = "exact",
) -> dict[str, float]:
    """The best of all ground truths: one text, several, or `{"target": ...}` of either. `metric` chooses the score."""
    if metric not in ("exact", "f1"):
        raise RewardError(f"qa: metric={metric!r} is unknown; choose 'exact' or 'f1'")
    truths = _texts(ground_truth["target"] if isinstance(ground_truth, dict) else ground_truth)
    if not truths or not all(truth.strip() for truth in truths):
        raise RewardError(
            f"data_source {data_source!r}: the ground truth {str(ground_truth)[:80]!r} holds no text, or an empty one; "
            "reward_model.ground_truth must be the answer, or a list of answers"
        )
    answer = _answer(solution_str)
    exact = max(exact_match(answer, truth) for truth in truths)
    overlap = max(f1(answer, truth) for truth in truths)
    return {"score": exact if metric == "exact" else overlap, "acc": exact, "f1": overlap}


def _texts(truth: Any) -> list[str]:
    return [str(truth)] if isinstance(truth, str) or not hasattr(truth, "__iter__") else [str(each) for each in truth]


def _answer(text: str) -> str:
    start = text.rfind("<answer>")
    return text if start < 0 else text[start + len("<answer>") :].partition("</answer>")[0]
