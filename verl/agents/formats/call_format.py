"""Finds the calls in the text of a turn. Each format defines what a call looks like."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from verl.agents.formats.reader import Reader, UnreadableCallError, reject
from verl.agents.formats.schemas import Tools
from verl.agents.formats.tool_calls import Call, InvalidCall, ParsedReply, ToolCall

MAX_INVALID_CALLS = 16
"""Invalid calls after which the rest of a turn is reported as one.

A failed attempt to read a call may look at all of the text, so this bound keeps parsing linear."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format whose calls stand in the text, next to content.

    Tool calls inside reasoning are plain text. Reasoning ends with `</think>`; its beginning may be in the prompt.
    """

    opening: re.Pattern[str]  # how a call begins
    closing: str | None  # the end of a call; None if only the JSON ends it: nothing after a broken call is readable
    read_call: Callable[[Reader], ToolCall | None]  # starts at an opening; returns None if the text is content
    trailer: str = ""  # may follow the closing of a call; ignored

    def __call__(self, text: str, tools: Tools = ()) -> ParsedReply:
        calls: list[Call] = []
        content: list[str] = []
        kept = 0  # text before is in `content` or in a call
        for start, call, end in self._scan(text, tools, self._find_reasoning_end(text, tools), len(text)):
            content.append(text[kept:start])
            calls.append(call)
            kept = end
        if not calls:
            return ParsedReply(text, ())
        return ParsedReply("".join([*content, text[kept:]]).strip(), tuple(calls))

    def _scan(self, text: str, tools: Tools, position: int, stop: int) -> Iterator[tuple[int, Call, int]]:
        """Yield the start, call and end of each call that opens between two positions."""
        invalid_count = 0
        while opening := self.opening.search(text, position, stop):
            start = opening.start()
            if invalid_count == MAX_INVALID_CALLS:
                yield start, reject_rest(text[start:]), len(text)
                return
            reader = Reader(text, start, tools)
            call: Call | None
            try:
                call = self.read_call(reader)
            except UnreadableCallError as error:
                end, reason = self._find_end(text, opening.end(), str(error))
                call, reader.position = reject(text[start:end], reason, reader.name), end
                invalid_count += 1
            if self.trailer:
                reader.skip(self.trailer)
            position = reader.position
            if call is not None:
                yield start, call, position

    def _find_end(self, text: str, body: int, reason: str) -> tuple[int, str]:
        """Return where a broken call ends, and the reason: the given one, or that the call does not end."""
        if self.closing is None:
            return len(text), reason
        following = self.opening.search(text, body)
        limit = following.start() if following else len(text)
        end = text.find(self.closing, body, limit)
        if end < 0:
            return limit, f"The call does not end with {self.closing}."
        return end + len(self.closing), reason

    def _find_reasoning_end(self, text: str, tools: Tools) -> int:
        """Return where the reasoning ends; 0 without reasoning. `</think>` within a call is an argument."""
        is_open = text.lstrip().startswith("<think>")
        end = text.find("</think>")
        if end < 0:
            return len(text) if is_open else 0
        if not is_open:
            for _, call, call_end in self._scan(text, tools, 0, end):
                if call_end > end and not isinstance(call, InvalidCall):
                    return 0
        return end


def reject_rest(text: str) -> InvalidCall:
    return reject(text, f"The turn has more than {MAX_INVALID_CALLS} invalid calls, and its rest was not read.")
