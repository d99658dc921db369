"""Calls as JSON objects with a name and arguments: between tags (hermes), or bare (Llama 3)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.tool_calls import Call, ParsedReply, ToolCall
from verl.agents.tool_formats.scanning import (
    UnreadableCallError,
    collect_calls,
    dump_json,
    expect,
    read_json,
    reject,
    reject_until,
    skip_space,
    to_arguments,
)
from verl.agents.tool_formats.schemas import get_tool_names

_BEGIN, _END = "<tool_call>", "</tool_call>"
_HERMES_OPENING = re.compile(re.escape(_BEGIN))
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')

_PYTHON_TAG = "<|python_tag|>"
_LLAMA_OPENING = re.compile(
    r"<\|python_tag\|>"
    # anywhere in the text: an object that begins as a call does
    r'|\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"\\]*"\s*,\s*"(?:parameters|arguments)"\s*:'
    # at its start: also calls with other keys, or cut off
    r'|\A\s*\{\s*"(?:name|type|function|parameters|arguments)"\s*:'
)
_SEPARATOR = re.compile(r"(?:\s*;)?")


def parse_hermes(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedReply:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    return collect_calls(text, _HERMES_OPENING, _read_hermes)


def write_hermes(call: ToolCall) -> str:
    return f"{_BEGIN}\n{dump_json({'name': call.name, 'arguments': call.arguments})}\n{_END}"


def _read_hermes(match: re.Match[str]) -> tuple[list[Call], int]:
    text, body = match.string, match.end()
    try:
        value, end = read_json(text, skip_space(text, body), "call is")
        call = _to_call(value, ("arguments",))
        return [call], expect(text, end, _END, call.name)
    except UnreadableCallError as error:
        error.name = error.name or _find_name(text, body, text.find("<", body))
        return reject_until(text, match.start(), body, _BEGIN, _END, error)


def _find_name(text: str, start: int, end: int) -> str:
    """Return the name that an unreadable object seems to have."""
    match = _NAME.search(text, start, end if end >= 0 else len(text))
    return match[1] if match else ""


def _to_call(value: Any, argument_keys: Sequence[str]) -> ToolCall:
    if not isinstance(value, dict):
        raise UnreadableCallError("The call is not a JSON object.")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise UnreadableCallError('The call has no "name".')
    for key in argument_keys:
        if key in value:
            return ToolCall(name, to_arguments(value[key], name))
    raise UnreadableCallError(f'The call has no "{argument_keys[-1]}".', name)


def parse_llama3_json(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedReply:
    """Parse `{"name": ..., "parameters": {...}}`, also several with `;` between them, or after `<|python_tag|>`.

    Other JSON is content: a response may contain it. What follows a call with broken JSON belongs to that call, since
    nothing marks its end.
    """
    names = get_tool_names(tools)

    def read_calls(match: re.Match[str]) -> tuple[list[Call] | None, int]:
        if match[0] == _PYTHON_TAG:
            return _read_tagged(match)
        return _read_object(match, names)

    return collect_calls(text, _LLAMA_OPENING, read_calls)


def write_llama3_json(call: ToolCall) -> str:
    return dump_json({"name": call.name, "parameters": call.arguments})


def _read_object(match: re.Match[str], tool_names: set[str]) -> tuple[list[Call] | None, int]:
    text = match.string
    start = text.index("{", match.start())
    try:
        value, end = read_json(text, start, "call is")
    except UnreadableCallError as error:
        return [reject(text[start:], str(error), _find_name(text, start, len(text)))], len(text)
    is_call = "name" in value and ("arguments" in value or "parameters" in value)
    if not is_call and str(value.get("name")) not in tool_names:
        return None, end
    return [_check_call(value, text[start:end])], _skip_separator(text, end)


def _read_tagged(match: re.Match[str]) -> tuple[list[Call], int]:
    """Read the objects after a tag; all that follows belongs to it, up to text after the first call."""
    text, start = match.string, match.start()
    calls: list[Call] = []
    position = skip_space(text, match.end())
    while not calls or text.startswith("{", position):
        try:
            value, end = read_json(text, position, "call is")
        except UnreadableCallError as error:
            return [*calls, reject(text[start:], str(error), _find_name(text, start, len(text)))], len(text)
        calls.append(_check_call(value, text[position:end]))
        start = end = _skip_separator(text, end)
        position = skip_space(text, end)
    return calls, start


def _check_call(value: Any, text: str) -> Call:
    try:
        return _to_call(value, ("arguments", "parameters"))
    except UnreadableCallError as error:
        return reject(text, str(error), error.name)


def _skip_separator(text: str, position: int) -> int:
    match = _SEPARATOR.match(text, position)
    assert match is not None
    return match.end()
