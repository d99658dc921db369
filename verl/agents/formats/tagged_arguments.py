"""Calls with one pair of tags per argument and arguments as plain text: Qwen3-Coder and GLM.

Arguments are strings unless the schema of the tool declares another type."""

from __future__ import annotations

import re

from verl.agents.formats.call_format import CallFormat
from verl.agents.formats.reader import TOOL_NAME, Reader
from verl.agents.formats.schemas import convert_argument
from verl.agents.formats.tool_calls import ToolCall

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_QWEN_OPENING = re.compile(rf"(?:{_BEGIN}\s*)?{_FUNCTION}|{_BEGIN}")
_ARGUMENT_NAME = re.compile(r"[^<>\s](?:[^<>\n]*[^<>\s])?")


def _read_qwen(reader: Reader) -> ToolCall:
    """Read `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    The outer tags may be missing: the model forgets them at times, and vLLM accepts it.
    """
    reader.skip(_BEGIN)
    reader.expect(_FUNCTION)
    name = _read_tool_name(reader)
    reader.expect(">")
    arguments = {}
    while reader.skip(_PARAMETER):
        key = _read_argument_name(reader)
        reader.expect(">")
        value = reader.read_until(_PARAMETER_END, before=_PARAMETER).removeprefix("\n").removesuffix("\n")
        arguments[key] = convert_argument(reader.tools, name, key, value)
    reader.expect(_FUNCTION_END)
    return ToolCall(name, arguments)


def _read_glm(reader: Reader) -> ToolCall:
    """Read `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""
    reader.expect(_BEGIN)
    name = _read_tool_name(reader)
    arguments = {}
    while reader.skip(_KEY):
        key = _read_argument_name(reader)
        reader.expect(_KEY_END)
        reader.expect(_VALUE)
        value = reader.read_until(_VALUE_END, before=_KEY)
        arguments[key] = convert_argument(reader.tools, name, key, value)
    reader.expect(_END)
    return ToolCall(name, arguments)


def _read_tool_name(reader: Reader) -> str:
    reader.name = reader.read_match(TOOL_NAME, "the name of a tool")[0]
    return reader.name


def _read_argument_name(reader: Reader) -> str:
    return reader.read_match(_ARGUMENT_NAME, "the name of an argument")[0]


QWEN3_CODER = CallFormat(_QWEN_OPENING, _FUNCTION_END, _read_qwen, trailer=_END)
GLM = CallFormat(re.compile(_BEGIN), _END, _read_glm)
