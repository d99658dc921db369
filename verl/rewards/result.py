"""What became of scoring one answer: a score, or a failure that says why. A failure is never a 0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

from verl.types import Failed, FailureKind, Scored

__all__ = [
    "Failed",
    "FailureKind",
    "RewardInput",
    "RewardResult",
    "Scored",
    "format_timeout",
    "make_failure",
    "parse_result",
    "require_number",
    "truncate",
]

_MOST_METRICS = 256
_LONGEST_MESSAGE = 6000


class RewardInput(NamedTuple):
    """One finished answer as a reward function is told of it; the names are those of its parameters."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] | None = None


RewardResult = Scored | Failed

_MENDS: dict[FailureKind, str] = {
    "error": "mend the function: an answer that cannot be judged is a decision of yours, not a 0 of ours",
    "invalid": "a reward must be a finite number, or a dict with a 'score' and more numbers; mend the function: "
    "an answer that cannot be judged is a decision of yours, not a 0 of ours",
    "timeout": "make the function faster, or give it longer with reward.deadline_s",
    "died": "mend the function, or what it calls: it must return, also when an answer is strange",
}


def make_failure(kind: FailureKind, where: str, what: str, answer: RewardInput, mend: str = "") -> Failed:
    """A failure of the function `where` on one answer, told whole: what happened, to which sample, and the mend."""
    if len(what) > _LONGEST_MESSAGE:
        what = f"{what[: _LONGEST_MESSAGE // 4]}\n  ...\n{what[-_LONGEST_MESSAGE * 3 // 4 :]}"
    message = (
        f"{where}: {what.rstrip()}\n"
        f"  data_source:  {answer.data_source!r}\n"
        f"  answer:       {truncate(answer.solution_str)}\n"
        f"  ground truth: {truncate(answer.ground_truth)}\n"
        f"  {mend or _MENDS[kind]}"
    )
    return Failed(kind, message)


def format_timeout(deadline_s: float) -> str:
    return f"gave no score within its deadline of {deadline_s:g} s"


def parse_result(result: Any) -> tuple[float, dict[str, float], dict[str, str]]:
    """What a function returned: (score, the other finite numbers, what else there was and so is not among them).

    None and NaN say that this sample lacks the number: they are left out without a word.

    >>> read({"score": True, "length": 12, "judge": None, "parsed": "x = 3"})
    (1.0, {'length': 12.0}, {'parsed': "'x = 3'"})
    """
    if not isinstance(result, Mapping):
        return require_number("the score", result), {}, {}
    if "score" not in result:
        raise ValueError(
            f"returned a dict without 'score' (its keys: {truncate(', '.join(map(str, islice(result, 20))))})"
        )
    if len(result) > _MOST_METRICS:
        raise ValueError(f"returned a dict of {len(result):,} keys; at most {_MOST_METRICS} become metrics")
    metrics, skipped = {}, {}
    for key, value in result.items():
        if key == "score" or value is None:
            continue
        found, name = _scalar(value), str(key)[:200]
        if found is None or math.isinf(found):
            skipped[name] = truncate(value, 40)
        elif not math.isnan(found):
            metrics[name] = found
    return require_number("'score'", result["score"]), metrics, skipped


def require_number(what: str, value: Any) -> float:
    """A finite number, or a ValueError that shows what was returned as `what` instead."""
    found = _scalar(value)
    if found is None or not math.isfinite(found):
        raise ValueError(f"returned {truncate(value)} as {what}")
    return found


def _scalar(value: Any) -> float | None:
    """Whatever is one number: also a bool, and a numpy or torch scalar; never text."""
    if value is None or isinstance(value, str | bytes) or getattr(value, "ndim", 0) != 0:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def truncate(value: Any, limit: int = 200) -> str:
    """The first 200 characters, as a Python literal where it is text."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # noqa: BLE001 - the repr of a foreign object
        text = f"<{type(value).__name__} without a repr>"
    cut = f" ... ({len(text):,} characters)" if len(text) > limit else ""
    return (repr(text[:limit]) if isinstance(value, str) else text[:limit]) + cut
