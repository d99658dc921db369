"""The plainest scorer: the answer is the ground truth, or it is not."""

from __future__ import annotations

from typing import Any

__all__ = ["compute_score"]


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 when the answer equals the ground truth, blanks around either aside; else 0.0."""
    return float(solution_str.strip() == str(ground_truth).strip())
