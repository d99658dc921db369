"""Calls in a section between special tokens, each a header and arguments as JSON: DeepSeek and Kimi."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.agents.tool_calls import Call, InvalidCall, ParsedReply, ToolCall
from verl.agents.tool_formats.scanning import (
    MAX_INVALID_CALLS,
    UnreadableCallError,
    collect_calls,
    dump_json,
    expect,
    read_arguments,
    reject,
    reject_until,
    skip_space,
)


@dataclass(frozen=True, slots=True)
class SectionFormat:
    """The special tokens of a format, and how a call is read after its header."""

    section_begin: str
    section_end: str
    call_begin: str
    separator: str
    call_end: str
    read_body: Callable[[str, str, int], tuple[ToolCall, int]]  # (header, text, position after the separator)

    def parse(self, text: str) -> ParsedReply:
        opening = re.compile(f"{re.escape(self.section_begin)}|{re.escape(self.call_begin)}")
        return collect_calls(text, opening, self._read_section)

    def write(self, header: str, body: str) -> str:
        call = f"{self.call_begin}{header}{self.separator}{body}{self.call_end}"
        return f"{self.section_begin}{call}{self.section_end}"

    def _read_section(self, match: re.Match[str]) -> tuple[list[Call], int]:
        text = match.string
        if match[0] == self.call_begin:
            error = UnreadableCallError(f"The call is not in a section that begins with {self.section_begin}.")
            return reject_until(text, match.start(), match.end(), self.call_begin, self.call_end, error)
        calls: list[Call] = []
        invalid_count = 0
        position = skip_space(text, match.end())
        while position < len(text) and invalid_count < MAX_INVALID_CALLS:
            if text.startswith(self.section_end, position):
                break
            new, end = self._read_call(text, position)
            calls += new
            invalid_count += isinstance(new[-1], InvalidCall)
            position = skip_space(text, end)
        if text.startswith(self.section_end, position):
            position += len(self.section_end)
        return calls or [reject(text[match.start() : position], "The section of tool calls is empty.")], position

    def _read_call(self, text: str, start: int) -> tuple[list[Call], int]:
        body = start + len(self.call_begin)
        if not text.startswith(self.call_begin, start):
            end = self._find_next(text, start)
            return [reject(text[start:end], "The section of tool calls contains text that is not a call.")], end
        try:
            separator = text.find(self.separator, body)
            if separator < 0 or text.find(self.call_end, body, separator) >= 0:
                raise UnreadableCallError(f"The call has no {self.separator}.")
            call, end = self.read_body(text[body:separator].strip(), text, separator + len(self.separator))
            return [call], expect(text, end, self.call_end, call.name)
        except UnreadableCallError as error:
            return reject_until(text, start, body, self.call_begin, self.call_end, error)

    def _find_next(self, text: str, position: int) -> int:
        ends = [text.find(token, position) for token in (self.call_begin, self.section_end)]
        return min((end for end in ends if end >= 0), default=len(text))


_FENCED_NAME = re.compile(r"([^\n]*)\n```json\s*")
_KIMI_HEADER = re.compile(r"(?:functions\.)?(\S+):\d+")


def _read_deepseek(header: str, text: str, position: int) -> tuple[ToolCall, int]:
    """Read a call of V3.1 (`NAME<sep>{...}`), or of V3 and R1 (`function<sep>NAME` and arguments in a code fence)."""
    if text.startswith(("{", '"'), skip_space(text, position)):
        _require_name(header)
        arguments, end = read_arguments(text, position, header)
        return ToolCall(header, arguments), end
    fenced = _FENCED_NAME.match(text, position)
    if fenced is None:
        raise UnreadableCallError("The arguments are not a JSON object.", header)
    name = fenced[1].strip()
    _require_name(name)
    arguments, end = read_arguments(text, fenced.end(), name)
    return ToolCall(name, arguments), expect(text, end, "```", name)


def _read_kimi(header: str, text: str, position: int) -> tuple[ToolCall, int]:
    """Read a call with the header `functions.NAME:INDEX`. No arguments at all are an empty object."""
    match = _KIMI_HEADER.fullmatch(header)
    if match is None:
        raise UnreadableCallError("The call does not begin with functions.NAME:INDEX.")
    name = match[1]
    if text.startswith(_KIMI.call_end, skip_space(text, position)):
        return ToolCall(name, {}), position
    arguments, end = read_arguments(text, position, name)
    return ToolCall(name, arguments), end


def _require_name(name: str) -> None:
    if not name:
        raise UnreadableCallError("The call does not name a tool.")


_DEEPSEEK = SectionFormat(
    section_begin="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    call_begin="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    read_body=_read_deepseek,
)
_KIMI = SectionFormat(
    section_begin="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    call_begin="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    read_body=_read_kimi,
)


def parse_deepseek(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedReply:
    """Parse the calls of DeepSeek V3, R1 and V3.1."""
    return _DEEPSEEK.parse(text)


def parse_kimi(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedReply:
    """Parse the calls of Kimi K2."""
    return _KIMI.parse(text)


def write_deepseek(call: ToolCall) -> str:
    """Return a call as V3.1 writes it."""
    return _DEEPSEEK.write(call.name, dump_json(call.arguments))


def write_kimi(call: ToolCall) -> str:
    return _KIMI.write(f"functions.{call.name}:0", dump_json(call.arguments))
