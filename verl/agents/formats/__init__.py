"""Formats in which models write tool calls: small parsers that import no inference engine. Imported by agents only.

A call that is cut off or malformed is an `InvalidCall`, where vLLM's parsers return it as content or drop it."""

from __future__ import annotations

from verl.agents.formats.call_sections import DEEPSEEK, KIMI
from verl.agents.formats.harmony import read_harmony
from verl.agents.formats.json_objects import HERMES, LLAMA3_JSON
from verl.agents.formats.tagged_arguments import GLM, QWEN3_CODER
from verl.agents.formats.tool_calls import Parse

__all__ = ["FORMATS", "detect_format"]

FORMATS: dict[str, Parse] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3_json": LLAMA3_JSON,
    "gpt-oss": read_harmony,
    "glm": GLM,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
}
"""By value of `actor_rollout_ref.rollout.multi_turn.format`."""

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("kimi", ("<|tool_calls_section_begin|>",)),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("gpt-oss", ("<|start|>", "<|channel|>")),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("llama3_json", ("<|start_header_id|>", "<|python_tag|>")),
    ("llama3_json", ('{"name": function name, "parameters":',)),
)
"""Texts that a template contains, from the most to the least specific format."""


def detect_format(chat_template: str) -> str | None:
    """Return the format in which a model with this chat template writes tool calls, or None if it is not known."""
    for name, texts in _SIGNS:
        if all(text in chat_template for text in texts):
            return name
    return None
