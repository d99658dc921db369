"""Exact match: the whole response equals the ground truth."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1.0 if the response equals the ground truth, ignoring surrounding whitespace; else 0.0."""
    return float(solution_str.strip() == str(ground_truth).strip())
