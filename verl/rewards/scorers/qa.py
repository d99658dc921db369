"""Questions with short answers: exact match and word F1 with the normalization of SQuAD, except in numbers.

SQuAD drops all punctuation, so that 1.5 would equal 15, and -5 would equal 5.

The last `<answer>...</answer>` is graded, or the whole response without one.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any, Literal

from verl.errors import RewardError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
# Not a sign or point before a number, and not between two digits, where only commas go.
_PUNCTUATION = re.compile(
    rf"(?!(?<!\S)[-.]{{1,2}}\d|(?<=\d)[^,]\d|(?<=\s-)\.\d|(?<=^-)\.\d)[{re.escape(string.punctuation)}]"
)


def normalize(text: str) -> str:
    """Return the text in lowercase, without articles and punctuation outside of numbers unless nothing else is left."""
    lower = " ".join(text.lower().split())
    return " ".join(_ARTICLES.sub(" ", _PUNCTUATION.sub("", lower)).split()) or lower


def exact_match(answer: str, truth: str) -> float:
    """Return 1.0 if both are equal after normalization."""
    return float(normalize(answer) == normalize(truth))


def f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall over words."""
    given, expected = normalize(answer).split(), normalize(truth).split()
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
    """Return the best score over all ground truths: a text, a list of texts, or `{"target": ...}` with either."""
    if metric not in ("exact", "f1"):
        raise RewardError(f"qa: metric={metric!r} is unknown; choose 'exact' or 'f1'")
    truths = _to_texts(ground_truth["target"] if isinstance(ground_truth, dict) else ground_truth)
    if not truths or not all(truth.strip() for truth in truths):
        raise RewardError(
            f"data_source {data_source!r}: the ground truth {str(ground_truth)[:80]!r} is empty or has an empty "
            "text; set reward_model.ground_truth to the answer, or to a list of answers"
        )
    answer = _extract_answer(solution_str)
    exact = max(exact_match(answer, truth) for truth in truths)
    overlap = max(f1(answer, truth) for truth in truths)
    return {"score": exact if metric == "exact" else overlap, "acc": exact, "f1": overlap}


def _to_texts(truth: Any) -> list[str]:
    return [str(truth)] if isinstance(truth, str) or not hasattr(truth, "__iter__") else [str(each) for each in truth]


def _extract_answer(text: str) -> str:
    start = text.rfind("<answer>")
    return text if start < 0 else text[start + len("<answer>") :].partition("</answer>")[0]
