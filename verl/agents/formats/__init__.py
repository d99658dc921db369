"""Formats in which models write tool calls: small parsers that import no inference engine. Imported by agents only.

A call that is cut off or malformed is an `InvalidCall`, where vLLM's parsers return it as content or drop it."""

from __future__ import annotations

from verl.agents.formats.call_sections import DEEPSEEK, KIMI
from verl.agents.formats.detection import detect_format
from verl.agents.formats.harmony import GPT_OSS
from verl.agents.formats.json_objects import HERMES, LLAMA3_JSON
from verl.agents.formats.reader import TOOL_NAME
from verl.agents.formats.tagged_arguments import GLM, QWEN3_CODER
from verl.agents.formats.tool_calls import ToolCall, ToolFormat

__all__ = ["FORMATS", "detect_format", "format_call"]

FORMATS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3_json": LLAMA3_JSON,
    "gpt-oss": GPT_OSS,
    "glm": GLM,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
}
"""By value of `actor_rollout_ref.rollout.multi_turn.format`."""


def format_call(format: str, call: ToolCall) -> str:
    """Return a call as a model with this format writes it.

    Raises:
        ValueError: If the format cannot express the call, such as a name with a space or, where arguments are plain
            text, an argument that contains the tag that ends it.
    """
    if not TOOL_NAME.fullmatch(call.name):
        raise ValueError(f"{call.name!r} is not a name of a tool; use letters, digits, '_', '-' and '.'")
    return FORMATS[format].write(call)
