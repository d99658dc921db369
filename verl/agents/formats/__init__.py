"""Formats in which models write tool calls: small parsers that import no inference engine. Imported by agents only.

A call that is cut off or malformed is an `InvalidCall`, where vLLM's parsers return it as content or drop it."""

from __future__ import annotations

from verl.agents.formats.call_sections import DEEPSEEK, KIMI
from verl.agents.formats.detection import detect_format
from verl.agents.formats.harmony import read_harmony
from verl.agents.formats.json_objects import HERMES, LLAMA3_JSON
from verl.agents.formats.tagged_arguments import GLM, QWEN3_CODER
from verl.agents.formats.tool_calls import ToolFormat

__all__ = ["FORMATS", "detect_format"]

FORMATS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3_json": LLAMA3_JSON,
    "gpt-oss": read_harmony,
    "glm": GLM,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
}
"""By value of `actor_rollout_ref.rollout.multi_turn.format`."""
