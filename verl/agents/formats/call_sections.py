"""Calls in a section between special tokens, each a header and arguments as JSON: DeepSeek and Kimi."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from verl.agents.formats.call_format import CallFormat
from verl.agents.formats.reader import TOOL_NAME, Reader, UnreadableCallError
from verl.agents.formats.tool_calls import ToolCall


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The special tokens of a format."""

    section_begin: str
    section_end: str
    call_begin: str
    separator: str
    call_end: str

    def read_call_begin(self, reader: Reader) -> None:
        """Move past the beginning of a call: the first of a section, or one that follows another."""
        is_next = reader.text.endswith(self.call_end, 0, reader.position)
        if not reader.skip(self.section_begin) and not is_next:
            raise UnreadableCallError(f"The call is not in a section that begins with {self.section_begin}.")
        reader.expect(self.call_begin)

    def make_format(self, read_call: Callable[[Reader], ToolCall]) -> CallFormat:
        section, begin, end = map(re.escape, (self.section_begin, self.call_begin, self.call_end))
        opening = re.compile(rf"(?:{section}|(?<={end}))\s*{begin}|{section}|{begin}")
        return CallFormat(opening, self.call_end, read_call, trailer=self.section_end)


_DEEPSEEK = _Tokens(
    section_begin="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    call_begin="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
)
_KIMI = _Tokens(
    section_begin="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    call_begin="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
)
_FENCED_NAME = re.compile(rf"({TOOL_NAME.pattern})\s*```json")
_KIMI_HEADER = re.compile(rf"(?:functions\.)?({TOOL_NAME.pattern}):\d+")


def _read_deepseek(reader: Reader) -> ToolCall:
    """Read a call of V3.1 (`NAME<sep>{...}`), or of V3 and R1 (`function<sep>NAME` and arguments in a code fence)."""
    _DEEPSEEK.read_call_begin(reader)
    reader.name = reader.read_match(TOOL_NAME, "the name of a tool")[0]
    reader.expect(_DEEPSEEK.separator)
    fenced = reader.match(_FENCED_NAME)
    if fenced is not None:
        reader.name = fenced[1]
    arguments = reader.read_arguments()
    if fenced is not None:
        reader.expect("```")
    reader.expect(_DEEPSEEK.call_end)
    return ToolCall(reader.name, arguments)


def _read_kimi(reader: Reader) -> ToolCall:
    """Read a call with the header `functions.NAME:INDEX`. No arguments at all are an empty object."""
    _KIMI.read_call_begin(reader)
    reader.name = reader.read_match(_KIMI_HEADER, "functions.NAME:INDEX")[1]
    reader.expect(_KIMI.separator)
    if reader.skip(_KIMI.call_end):
        return ToolCall(reader.name, {})
    arguments = reader.read_arguments()
    reader.expect(_KIMI.call_end)
    return ToolCall(reader.name, arguments)


DEEPSEEK = _DEEPSEEK.make_format(_read_deepseek)
KIMI = _KIMI.make_format(_read_kimi)
