"""Results of tool calls, and the text that the model reads of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_TRUNCATED = "...(truncated)..."


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call: text for the model, and a reward for the turn that made the call."""

    text: str
    reward: float = 0.0


def to_result(value: Any) -> ToolResult:
    """Convert what a tool returned: text, anything that JSON can express, or a `(text, reward)` pair."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], (int, float)):
        return ToolResult(to_result(value[0]).text, float(value[1]))
    return ToolResult(value if isinstance(value, str) else json.dumps(value, default=str))


def truncate_text(text: str, limit: int, side: str) -> str:
    """Shorten text to `limit` characters, removing them on a `side`: left, right or middle.

    >>> truncate_text("0123456789" * 3, 4, "middle")
    '01...(truncated)...89'
    """
    if len(text) <= limit:
        return text
    if side == "left":
        return _TRUNCATED + text[len(text) - limit :]
    if side == "right":
        return text[:limit] + _TRUNCATED
    return text[: limit - limit // 2] + _TRUNCATED + text[len(text) - limit // 2 :]
