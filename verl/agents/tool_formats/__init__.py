"""Formats in which models write tool calls: small parsers that import no inference engine. Imported by agents only.

Reasoning up to `</think>` is content, and calls in it are not calls. A call that is cut off or malformed is an
`InvalidCall`, where vLLM's parsers return it as content or drop it."""

from __future__ import annotations

from collections.abc import Callable

from verl.agents.tool_calls import ReplyParser, ToolCall
from verl.agents.tool_formats.call_sections import parse_deepseek, parse_kimi, write_deepseek, write_kimi
from verl.agents.tool_formats.detection import detect_format
from verl.agents.tool_formats.harmony import parse_gpt_oss, write_gpt_oss
from verl.agents.tool_formats.json_objects import parse_hermes, parse_llama3_json, write_hermes, write_llama3_json
from verl.agents.tool_formats.tagged_arguments import parse_glm, parse_qwen3_coder, write_glm, write_qwen3_coder

__all__ = ["FORMATS", "detect_format", "format_call"]

FORMATS: dict[str, ReplyParser] = {
    "hermes": parse_hermes,
    "qwen3_coder": parse_qwen3_coder,
    "llama3_json": parse_llama3_json,
    "gpt-oss": parse_gpt_oss,
    "glm": parse_glm,
    "deepseek": parse_deepseek,
    "kimi": parse_kimi,
}
"""Parsers by value of `actor_rollout_ref.rollout.multi_turn.format`."""

_WRITERS: dict[str, Callable[[ToolCall], str]] = {
    "hermes": write_hermes,
    "qwen3_coder": write_qwen3_coder,
    "llama3_json": write_llama3_json,
    "gpt-oss": write_gpt_oss,
    "glm": write_glm,
    "deepseek": write_deepseek,
    "kimi": write_kimi,
}


def format_call(format: str, call: ToolCall) -> str:
    """Return a call as a model with this format writes it.

    Raises:
        ValueError: If the format cannot express the call, such as a name with a space or, where arguments are plain
            text, an argument that contains the tag that ends it.
    """
    if not call.name or any(character.isspace() or character in '<>{}"' for character in call.name):
        raise ValueError(f"{call.name!r} is not a name of a tool; use letters, digits, '_', '-' and '.'")
    return _WRITERS[format](call)
