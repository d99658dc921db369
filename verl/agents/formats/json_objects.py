"""Calls as JSON objects with a name and arguments: between tags (hermes), or bare (Llama 3)."""

from __future__ import annotations

import re
from typing import Any

from verl.agents.formats.call_format import CallFormat
from verl.agents.formats.reader import Reader, UnreadableCallError, to_arguments
from verl.agents.formats.schemas import has_tool
from verl.agents.formats.tool_calls import ToolCall

_BEGIN, _END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_LLAMA_OPENING = re.compile(
    r"<\|python_tag\|>"
    # anywhere in the text: an object that begins as a call does
    r'|\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"\\]*"\s*,\s*"(?:parameters|arguments)"\s*:'
    # at its start: also calls with other keys, or cut off
    r'|\A\s*\{\s*"(?:name|type|parameters|arguments)"\s*:'
)


def _read_hermes(reader: Reader) -> ToolCall:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    reader.expect(_BEGIN)
    call = _to_call(reader, reader.read_json("call is"), "arguments")
    reader.expect(_END)
    return call


def _read_llama(reader: Reader) -> ToolCall | None:
    """Read `{"name": ..., "parameters": {...}}`. Other JSON is content, except after `<|python_tag|>`."""
    is_tagged = reader.skip(_PYTHON_TAG)
    value = reader.read_json("call is")
    key = "arguments" if isinstance(value, dict) and "arguments" in value else "parameters"
    if is_tagged or ("name" in value and (key in value or has_tool(reader.tools, value["name"]))):
        return _to_call(reader, value, key)
    return None


def _to_call(reader: Reader, value: Any, key: str) -> ToolCall:
    if not isinstance(value, dict):
        raise UnreadableCallError("The call is not a JSON object.")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise UnreadableCallError('The call has no "name".')
    reader.name = name
    if key not in value:
        raise UnreadableCallError(f'The call has no "{key}".')
    return ToolCall(name, to_arguments(value[key]))


HERMES = CallFormat(re.compile(_BEGIN), _END, _read_hermes)
LLAMA3_JSON = CallFormat(_LLAMA_OPENING, None, _read_llama, trailer=";")
