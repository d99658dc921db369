"""Calls with one pair of tags per argument and arguments as plain text: Qwen3-Coder and GLM.

Arguments are strings unless the schema of the tool declares another type."""

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
    reject_until,
    skip_space,
)
from verl.agents.tool_formats.schemas import ArgumentTypes

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"

_QWEN_OPENING = re.compile(f"{_BEGIN}|{_FUNCTION}")
_GLM_OPENING = re.compile(_BEGIN)
_GLM_NAME = re.compile(r"\s*([\w.:/-]+)\s*(?=<)")

Tools = Sequence[Mapping[str, Any]]


def parse_qwen3_coder(text: str, tools: Tools = ()) -> ParsedReply:
    """Parse `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    The outer tags may be missing or contain several functions: vLLM accepts both.
    """

    def read_calls(match: re.Match[str]) -> tuple[list[Call], int]:
        return _read_bare_function(match, tools) if match[0] == _FUNCTION else _read_functions(match, tools)

    return collect_calls(text, _QWEN_OPENING, read_calls)


def write_qwen3_coder(call: ToolCall) -> str:
    parameters = "".join(
        f"{_PARAMETER}{_check_key(key)}>\n{_write_value(value, _PARAMETER, _PARAMETER_END)}\n{_PARAMETER_END}\n"
        for key, value in call.arguments.items()
    )
    return f"{_BEGIN}\n{_FUNCTION}{call.name}>\n{parameters}{_FUNCTION_END}\n{_END}"


def _read_bare_function(match: re.Match[str], tools: Tools) -> tuple[list[Call], int]:
    text, start = match.string, match.start()
    try:
        call, end = _read_function(text, start, tools)
    except UnreadableCallError as error:
        return reject_until(text, start, match.end(), _FUNCTION, _FUNCTION_END, error)
    after = skip_space(text, end)
    return [call], after + len(_END) if text.startswith(_END, after) else end


def _read_functions(match: re.Match[str], tools: Tools) -> tuple[list[Call], int]:
    text, start = match.string, match.start()
    calls: list[Call] = []
    position = skip_space(text, match.end())
    try:
        while not calls or text.startswith(_FUNCTION, position):
            call, position = _read_function(text, position, tools)
            calls.append(call)
            position = skip_space(text, position)
        if not text.startswith(_END, position):
            last = calls.pop()
            raise UnreadableCallError(f"There is text between {_FUNCTION_END} and {_END}.", last.name)
    except UnreadableCallError as error:
        invalid, end = reject_until(text, start, max(position, match.end()), _BEGIN, _END, error)
        return [*calls, *invalid], end
    return calls, position + len(_END)


def _read_function(text: str, position: int, tools: Tools) -> tuple[ToolCall, int]:
    if not text.startswith(_FUNCTION, position):
        raise UnreadableCallError(f"The call does not begin with {_FUNCTION}NAME>.")
    name, position = _read_key(text, position + len(_FUNCTION), "The call does not name a tool.")
    types = ArgumentTypes(tools, name)
    arguments: dict[str, Any] = {}
    while text.startswith(_PARAMETER, position := skip_space(text, position)):
        key, position = _read_key(text, position + len(_PARAMETER), "A parameter has no name.", name)
        value, position = _read_value(text, position, _PARAMETER, _PARAMETER_END, key, name)
        arguments[key] = types.convert(key, _strip_newlines(value))
    return ToolCall(name, arguments), expect(text, position, _FUNCTION_END, name)


def _read_key(text: str, position: int, reason: str, tool_name: str = "") -> tuple[str, int]:
    """Return the name up to `>`."""
    end = text.find(">", position)
    key = text[position : max(end, position)].strip()
    if not key or "<" in key or "\n" in key:
        raise UnreadableCallError(reason, tool_name)
    return key, end + 1


def _read_value(text: str, position: int, opening: str, closing: str, key: str, name: str) -> tuple[str, int]:
    """Return the text up to `closing`. An `opening` before it means that the closing tag was forgotten."""
    end = text.find(closing, position)
    if end < 0 or text.find(opening, position, end) >= 0:
        raise UnreadableCallError(f"The argument {key!r} does not end with {closing}.", name)
    return text[position:end], end + len(closing)


def _strip_newlines(value: str) -> str:
    """Remove the line breaks of the template: one on each side."""
    return value.removeprefix("\n").removesuffix("\n")


def _write_value(value: Any, opening: str, closing: str) -> str:
    text = value if isinstance(value, str) else dump_json(value)
    if opening in text or closing in text:
        raise ValueError(f"an argument contains {opening} or {closing}, which the format cannot express")
    return text


def _check_key(key: str) -> str:
    if not key or key != key.strip() or any(character in "<>\n" for character in key):
        raise ValueError(f"{key!r} is not a name of an argument; use letters, digits and '_'")
    return key


def parse_glm(text: str, tools: Tools = ()) -> ParsedReply:
    """Parse `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    def read_calls(match: re.Match[str]) -> tuple[list[Call], int]:
        try:
            call, end = _read_glm(match.string, match.end(), tools)
        except UnreadableCallError as error:
            return reject_until(match.string, match.start(), match.end(), _BEGIN, _END, error)
        return [call], end

    return collect_calls(text, _GLM_OPENING, read_calls)


def write_glm(call: ToolCall) -> str:
    arguments = "".join(
        f"{_KEY}{_check_key(key)}{_KEY_END}\n{_VALUE}{_write_value(value, _KEY, _VALUE_END)}{_VALUE_END}\n"
        for key, value in call.arguments.items()
    )
    return f"{_BEGIN}{call.name}\n{arguments}{_END}"


def _read_glm(text: str, position: int, tools: Tools) -> tuple[ToolCall, int]:
    header = _GLM_NAME.match(text, position)
    if header is None:
        raise UnreadableCallError(f"The name of a tool does not follow {_BEGIN}.")
    name, position = header[1], header.end()
    types = ArgumentTypes(tools, name)
    arguments: dict[str, Any] = {}
    while text.startswith(_KEY, position):
        end = text.find(_KEY_END, position)
        key = text[position + len(_KEY) : max(end, position)].strip()
        if not key or "<" in key:
            raise UnreadableCallError("An argument has no name.", name)
        position = skip_space(text, end + len(_KEY_END))
        if not text.startswith(_VALUE, position):
            raise UnreadableCallError(f"The argument {key!r} has no {_VALUE}.", name)
        value, position = _read_value(text, position + len(_VALUE), _KEY, _VALUE_END, key, name)
        arguments[key] = types.convert(key, value)
        position = skip_space(text, position)
    return ToolCall(name, arguments), expect(text, position, _END, name)
