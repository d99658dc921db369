"""GSM8K: the answer is the number after the last `####`, as in the data set's own solutions."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from verl.errors import RewardError

__all__ = ["compute_score", "final_number"]

_MARKED = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")


def final_number(text: str) -> Decimal | None:
    """The number after the last `####`, without thousands separators; None when there is none.

    >>> final_number("5 * 250 = 1250\\n#### 1,250")
    Decimal('1250')
    """
    found = _MARKED.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 when the marked number equals the ground truth (a number, or a whole solution that ends in `#### number`)."""
    truth = str(ground_truth)
    expected = final_number(truth if "####" in truth else f"#### {truth}")
    if expected is None:
        raise RewardError(
            f"data_source {data_source!r}: the ground truth {truth[:80]!r} holds no number; GSM8K rows need a number, "
            "or a solution that ends in '#### number', in reward_model.ground_truth"
        )
    return float(final_number(solution_str) == expected)
