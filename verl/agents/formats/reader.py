"""Reads the parts of a call from the text of a turn: tokens, names, arguments as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.formats.tool_calls import InvalidCall

TOOL_NAME = re.compile(r"[\w.:/-]+")

_MAX_NESTING = 100  # levels of JSON; far below those that exhaust the stack of the encoders a value passes later
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")


class UnreadableCallError(ValueError):
    """A call cannot be read. The message is a sentence for the model."""


class Reader:
    """A position in the text of a turn. Its methods move forward, past any space before what they look for."""

    def __init__(self, text: str, position: int = 0, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.text, self.position, self.tools = text, position, tools
        self.name = ""  # name of the called tool, once it is read

    def skip(self, token: str) -> bool:
        """Move past a token. Returns False, without moving, if it is not next."""
        start = self._skip_space()
        if not self.text.startswith(token, start):
            return False
        self.position = start + len(token)
        return True

    def expect(self, token: str) -> None:
        """Move past a token that has to be next."""
        if not self.skip(token):
            raise UnreadableCallError(f"Expected {token} {self._describe_next()}.")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Move past a match of the pattern. Returns None, without moving, if it is not next."""
        match = pattern.match(self.text, self._skip_space())
        if match is not None:
            self.position = match.end()
        return match

    def read_match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        """Return the match of a pattern that has to be next. `what` describes it to the model."""
        match = self.match(pattern)
        if match is None:
            raise UnreadableCallError(f"Expected {what} {self._describe_next()}.")
        return match

    def read_until(self, token: str, before: str) -> str:
        """Return the exact text up to `token`, and move past it. It has to come before the next `before`."""
        end = self.text.find(token, self.position)
        if end < 0 or self.text.find(before, self.position, end) >= 0:
            raise UnreadableCallError(f"Expected {token} after the text {self._describe_next()}.")
        value = self.text[self.position : end]
        self.position = end + len(token)
        return value

    def read_json(self, what: str = "arguments are") -> Any:
        """Return the JSON value that is next. `what` describes it to the model."""
        try:
            value, self.position = _DECODER.raw_decode(self.text, self._skip_space())
            _require_shallow(value, _MAX_NESTING)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # Python reads more than JSON can express.
        except json.JSONDecodeError as error:
            message = f"{error.msg.removesuffix(' at')} {self._describe(error.pos)}"
            raise UnreadableCallError(f"The {what} not valid JSON: {message}.") from None
        except RecursionError:
            raise UnreadableCallError(f"The {what} nested too deeply.") from None
        except UnicodeEncodeError:
            raise UnreadableCallError(f"The {what} not valid JSON: half of a surrogate pair.") from None
        except ValueError:
            raise UnreadableCallError(f"The {what} not valid JSON: a number is infinite, NaN or too long.") from None
        return value

    def read_arguments(self) -> dict[str, Any]:
        return to_arguments(self.read_json())

    def expect_end(self) -> None:
        """Raise unless only space is left."""
        if self._skip_space() < len(self.text):
            raise UnreadableCallError(f"The arguments are not valid JSON: Extra data {self._describe_next()}.")

    def _skip_space(self) -> int:
        match = _SPACE.match(self.text, self.position)
        assert match is not None
        return match.end()

    def _describe_next(self) -> str:
        return self._describe(self._skip_space())

    def _describe(self, position: int) -> str:
        rest = self.text[position : position + 20]
        return f"near {rest!r}" if rest else "at the end"


def to_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a call from its JSON: an object, or a string that contains one."""
    if isinstance(value, str):
        value = load_json(value)
    if not isinstance(value, dict):
        raise UnreadableCallError("The arguments are not a JSON object.")
    return value


def load_json(text: str) -> Any:
    """Return the JSON value that is all of the text."""
    reader = Reader(text)
    value = reader.read_json()
    reader.expect_end()
    return value


def _require_shallow(value: Any, levels: int) -> None:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if children and levels == 0:
        raise RecursionError
    for child in children:
        _require_shallow(child, levels - 1)


def reject(text: str, reason: str, name: str = "") -> InvalidCall:
    """Return an invalid call, with its text shortened for messages."""
    return InvalidCall(text if len(text) <= 300 else f"{text[:200]} ... {text[-80:]}", reason, name)
