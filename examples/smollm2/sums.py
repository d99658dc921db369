"""The reward of two-digit sums: 1 if the last number of the response is the sum."""

from __future__ import annotations

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    numbers = re.findall(r"\d+", solution_str.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == ground_truth)
