"""Recognizes the format of tool calls from a chat template."""

from __future__ import annotations

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
