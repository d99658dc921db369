"""Tool calls as the model wrote them, independent of the format of its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that was parsed. Whether the tool exists and accepts the arguments is checked when the call runs."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidCall:
    """A tool call that cannot be parsed. The model gets the reason as an error."""

    text: str  # what the model wrote, shortened
    reason: str  # one sentence for the model
    name: str = ""  # name of the tool, if it could be read


Call = ToolCall | InvalidCall


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """One turn of the model, split into text and calls.

    `ParsedReply("Let me check.", (ToolCall("weather", {"city": "Oslo"}),))` is what the text of `content` followed by
    one call is read as, in every format.
    """

    content: str  # text outside of the calls, stripped if there are calls
    calls: tuple[Call, ...]  # in the order written


Parse = Callable[[str, Sequence[Mapping[str, Any]]], ParsedReply]
"""Splits the text of a turn, with its special tokens but without the one that ends it, into content and calls.

The schemas of the tools are as in a chat completion request: formats that write arguments as plain text convert them to
the declared types. A parser never raises, and takes time linear in the text."""
