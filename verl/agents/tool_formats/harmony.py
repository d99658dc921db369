"""The format of gpt-oss: a turn is a sequence of messages with channels, and a call is a message to a function."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.tool_calls import Call, InvalidCall, ParsedReply, ToolCall
from verl.agents.tool_formats.scanning import (
    MAX_INVALID_CALLS,
    UnreadableCallError,
    dump_json,
    read_arguments,
    reject,
    reject_rest,
    skip_space,
)

_MESSAGE = "<|message|>"
_BOUNDARY = re.compile(r"<\|(?:start|end|call|return)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|(?<=[\s>]))to=(?:functions\.)?([^\s<]+)")


def parse_gpt_oss(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedReply:
    """Parse `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.

    The content is the text of messages without a recipient, except for the channel `analysis`, which is reasoning.
    """
    content: list[str] = []
    calls: list[Call] = []
    invalid_count = position = 0
    while position < len(text):
        if invalid_count >= MAX_INVALID_CALLS:
            calls.append(reject_rest(text[position:]))
            break
        start, position = position, text.find(_MESSAGE, position)
        if position < 0:
            _add_headers(_BOUNDARY.split(text[start:]), content, calls)
            break
        *incomplete, header = _BOUNDARY.split(text[start:position])
        _add_headers(incomplete, content, calls)
        body = position + len(_MESSAGE)
        if recipient := _RECIPIENT.search(header):
            call, position = _read_call(text, position - len(header), body, recipient[1])
            calls.append(call)
            invalid_count += isinstance(call, InvalidCall)
        else:
            boundary = _BOUNDARY.search(text, body)
            end, position = boundary.span() if boundary else (len(text), len(text))
            channel = _CHANNEL.search(header)
            if end > body and not (channel and channel[1] == "analysis"):
                content.append(text[body:end])
    return ParsedReply("\n".join(content) if content or calls else text, tuple(calls))


def write_gpt_oss(call: ToolCall) -> str:
    """Return a call as the model continues `<|start|>assistant`."""
    header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json"
    return f"{header}{_MESSAGE}{dump_json(call.arguments)}<|call|>"


def _add_headers(headers: Sequence[str], content: list[str], calls: list[Call]) -> None:
    """Add what has no `<|message|>`: broken calls, and text outside of messages."""
    for header in headers:
        if (recipient := _RECIPIENT.search(header)) and _CHANNEL.search(header):
            calls.append(reject(header, f"The call has no {_MESSAGE}.", recipient[1]))
        elif header.strip() and header != "assistant":
            content.append(header)


def _read_call(text: str, start: int, body: int, name: str) -> tuple[Call, int]:
    """Return the call whose arguments begin at `body`, and where its message ends."""
    try:
        arguments, end = read_arguments(text, body, name)
        end = skip_space(text, end)
        if end == len(text):  # The token that ends the turn also ends the call.
            return ToolCall(name, arguments), end
        if boundary := _BOUNDARY.match(text, end):
            return ToolCall(name, arguments), boundary.end()
        raise UnreadableCallError("There is text after the arguments.", name)
    except UnreadableCallError as error:
        boundary = _BOUNDARY.search(text, body)
        end = boundary.end() if boundary else len(text)
        return reject(text[start:end], str(error), name), end
