"""The tool and the reward of show-tools."""

from __future__ import annotations

from typing import Any

import verl
from verl.agents.errors import ToolError


@verl.tool
async def lookup(key: str, *, row: dict[str, Any]) -> str:
    """Return a value."""
    if key != row["extra_info"]["key"]:
        raise ToolError("no such key")
    return str(row["ground_truth"])


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return whether the last turn is the secret."""
    return float(solution_str.strip() == ground_truth)
