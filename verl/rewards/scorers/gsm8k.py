"""GSM8K: the number after the last `####`, as in the solutions of the data set."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from verl.errors import RewardError

_NUMBER = re.compile(
    r"[\s*]*(?P<sign>-?)\$?(?P<minus>-?)(?P<digits>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
    # Not part of a longer number, a list without spaces, a fraction, a formula or a range.
    r"(?![\d,.]*\d|[eE][-+]?\d|\s*[-+*/^=×÷:|]\s*[\d(]|[²³¹⁰⁴-⁹½¼¾]|[ \t]+\d"
    r"|\s*(?:(?:or|to)\s+\$?\d|(?:hundred|thousand|million|billion|trillion|dozen)\b))",
    re.I,
)


def final_number(text: str) -> Decimal | None:
    """Return the number right after the last `####` that has one, without thousands separators; None without one.

    A dollar sign and bold type are skipped. More than one number (`18/2`, `17-19`, `1,2,3`) counts as none.
    """
    for piece in reversed(text.replace("−", "-").split("####")[1:]):
        if match := _NUMBER.match(piece):
            sign = -1 if match["sign"] or match["minus"] else 1
            return sign * Decimal(match["digits"].replace(",", ""))
    return None


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1.0 if the final number equals the ground truth (a number, or a solution that ends in `#### number`)."""
    truth = str(ground_truth)
    expected = final_number(truth if "####" in truth else f"#### {truth}")
    if expected is None:
        raise RewardError(
            f"data_source {data_source!r}: the ground truth {truth[:80]!r} has no number; set "
            "reward_model.ground_truth to a number, or to a solution that ends in '#### number'"
        )
    return float(final_number(solution_str) == expected)
