"""The format of gpt-oss: a turn is a sequence of messages with channels, and a call is a message to a function."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.formats.call_format import MAX_INVALID_CALLS, reject_rest
from verl.agents.formats.reader import Reader, UnreadableCallError, reject
from verl.agents.formats.tool_calls import Call, InvalidCall, ParsedReply, ToolCall

_CHANNEL, _MESSAGE, _CALL = "<|channel|>", "<|message|>", "<|call|>"
_BOUNDARY = re.compile(r"<\|start\|>(?:assistant)?|<\|(?:end|call|return)\|>|\Z")
_HEADER_END = re.compile(rf"{re.escape(_MESSAGE)}|{_BOUNDARY.pattern}")
_REASONING = re.compile(rf"{re.escape(_CHANNEL)}\s*analysis\b")
_RECIPIENT = re.compile(r"(?<![^\s>])to=(?:functions\.)?([^\s<]+)")


def read_harmony(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedReply:
    """Split a turn of gpt-oss into content and calls.

    The content is the text of messages without a recipient, except for the channel `analysis`, which is reasoning.
    """
    reader, invalid_count = Reader(text), 0
    content: list[str] = []
    calls: list[Call] = []
    while reader.position < len(text):
        if invalid_count == MAX_INVALID_CALLS:
            calls.append(reject_rest(text[reader.position :]))
            break
        message = _read_message(reader)
        if isinstance(message, str):
            content.append(message)
        else:
            calls.append(message)
            invalid_count += isinstance(message, InvalidCall)
    return ParsedReply("\n".join(filter(None, content)), tuple(calls))


def _read_message(reader: Reader) -> Call | str:
    """Return the next message: a call, or its text, which is empty if it is reasoning.

    The recipient of a call is in the role (`assistant to=functions.NAME`) or in the channel.
    """
    start = reader.position
    header, header_end = _read_to(reader, _HEADER_END)
    recipient = _RECIPIENT.search(header)
    if header_end != _MESSAGE:  # text outside of messages, or a cut-off call
        if recipient and _CHANNEL in header:
            return reject(header, f"The call has no {_MESSAGE}.", recipient[1])
        return header if header.strip() else ""
    if recipient:
        return _read_call(reader, start, recipient[1])
    text, _ = _read_to(reader, _BOUNDARY)
    return "" if _REASONING.search(header) else text


def _read_call(reader: Reader, start: int, name: str) -> Call:
    body = reader.position
    try:
        arguments = reader.read_arguments()
        reader.read_match(_BOUNDARY, _CALL)
        return ToolCall(name, arguments)
    except UnreadableCallError as error:
        reader.position = body
        _read_to(reader, _BOUNDARY)
        return reject(reader.text[start : reader.position], str(error), name)


def _read_to(reader: Reader, pattern: re.Pattern[str]) -> tuple[str, str]:
    """Return the text up to a match, and the match, which may be the end of the text."""
    match = pattern.search(reader.text, start := reader.position)
    assert match is not None
    reader.position = match.end()
    return reader.text[start : match.start()], match[0]
