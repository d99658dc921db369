"""What the formats have in common: finding calls in a text, reading their JSON, and reporting those that are broken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from verl.agents.tool_calls import Call, InvalidCall, ParsedReply, ToolCall

MAX_INVALID_CALLS = 16
"""Invalid calls after which the rest of a turn is reported as one.

A failed attempt to read a call may look at all of the text, so this bound keeps parsing linear."""

MAX_NESTING = 100
"""Levels of nested JSON, far below those that exhaust the stack of the encoders a value passes later."""

ReadCalls = Callable[[re.Match[str]], tuple[Sequence[Call] | None, int]]
"""(match of an opening) -> (calls, where they end); no calls (None) if the text up to there is content."""

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_REASONING_END = "</think>"


class UnreadableCallError(ValueError):
    """A call cannot be read. The message is a sentence for the model."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name


def collect_calls(text: str, opening: re.Pattern[str], read_calls: ReadCalls) -> ParsedReply:
    """Read calls wherever `opening` matches after the reasoning. Every read must end after its opening."""
    calls: list[Call] = []
    outside: list[str] = []
    kept, invalid_count = 0, 0  # text before `kept` is in `outside` or in a call
    position = _find_reasoning_end(text, opening, read_calls)
    while match := opening.search(text, position):
        if invalid_count >= MAX_INVALID_CALLS:
            outside.append(text[kept : match.start()])
            calls.append(reject_rest(text[match.start() :]))
            kept = len(text)
            break
        new, position = read_calls(match)
        if new is None:
            continue
        outside.append(text[kept : match.start()])
        kept = position
        calls += new
        invalid_count += sum(isinstance(call, InvalidCall) for call in new)
    if not calls:
        return ParsedReply(text, ())
    return ParsedReply("".join([*outside, text[kept:]]).strip(), tuple(calls))


def _find_reasoning_end(text: str, opening: re.Pattern[str], read_calls: ReadCalls) -> int:
    """Return where the reasoning ends, or 0 if there is none.

    Templates may open the reasoning in the prompt, so `</think>` alone ends it, unless it is inside of a readable call.
    """
    end = text.find(_REASONING_END)
    if end < 0:
        return 0
    end += len(_REASONING_END)
    if text.lstrip().startswith("<think>"):
        return end
    position = invalid_count = 0
    while invalid_count < MAX_INVALID_CALLS and (match := opening.search(text, position, end)):
        calls, position = read_calls(match)
        is_readable = bool(calls) and all(isinstance(call, ToolCall) for call in calls or ())
        if position > end:
            return 0 if is_readable else end
        invalid_count += not is_readable
    return end


def reject(text: str, reason: str, name: str = "") -> InvalidCall:
    """Return an invalid call, with its text shortened for messages."""
    shown = text if len(text) <= 300 else f"{text[:200]} ... {text[-80:]}"
    return InvalidCall(shown, reason, name)


def reject_rest(text: str) -> InvalidCall:
    return reject(text, f"The turn has more than {MAX_INVALID_CALLS} invalid calls, and its rest was not read.")


def reject_until(
    text: str, start: int, body: int, opening: str, closing: str, error: UnreadableCallError
) -> tuple[list[Call], int]:
    """Return the broken call at `start` and where it ends: with its `closing`, or before the next `opening`."""
    next_start = text.find(opening, body)
    next_start = len(text) if next_start < 0 else next_start
    end = text.find(closing, body, next_start)
    if end < 0:
        return [reject(text[start:next_start], f"The call does not end with {closing}.", error.name)], next_start
    end += len(closing)
    return [reject(text[start:end], str(error), error.name)], end


def skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def expect(text: str, position: int, token: str, name: str) -> int:
    """Return where `token` ends, which must follow at `position` after optional space."""
    position = skip_space(text, position)
    if not text.startswith(token, position):
        raise UnreadableCallError(f"The arguments are not followed by {token}.", name)
    return position + len(token)


def read_json(text: str, position: int, what: str, name: str = "") -> tuple[Any, int]:
    """Return the JSON value at `position` and where it ends. `what` names it in errors."""
    try:
        value, end = _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        rest = text[error.pos : error.pos + 20]
        where = f"near {rest!r}" if rest else "at the end"
        raise UnreadableCallError(f"The {what} not valid JSON: {error.msg} {where}.", name) from None
    except RecursionError:
        raise UnreadableCallError(f"The {what} nested too deeply.", name) from None
    except ValueError:
        raise UnreadableCallError(f"The {what} not readable: a number has too many digits.", name) from None
    _require_portable(value, what, name)
    return value, end


def _require_portable(value: Any, what: str, name: str) -> None:
    """Refuse values that Python reads but that cannot be sent to a tool in another process."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [child for parent in level for child in _get_children(parent)]
        if not level:
            break
    else:
        raise UnreadableCallError(f"The {what} nested too deeply.", name)
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise UnreadableCallError(f"The {what} not valid JSON: half of a surrogate pair.", name) from None
    except ValueError:
        raise UnreadableCallError(f"The {what} not valid JSON: NaN or an infinite number.", name) from None


def _get_children(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def to_arguments(value: Any, name: str) -> dict[str, Any]:
    """Return the arguments of a call from its JSON: an object, or a string that contains one."""
    if isinstance(value, str):
        encoded = value
        value, end = read_json(encoded, skip_space(encoded, 0), "arguments are", name)
        if skip_space(encoded, end) < len(encoded):
            raise UnreadableCallError("The arguments are a string with text after its JSON object.", name)
    if not isinstance(value, dict):
        raise UnreadableCallError("The arguments are not a JSON object.", name)
    return value


def read_arguments(text: str, position: int, name: str) -> tuple[dict[str, Any], int]:
    """Return the arguments written as JSON at `position`, after optional space, and where they end."""
    value, end = read_json(text, skip_space(text, position), "arguments are", name)
    return to_arguments(value, name), end


def dump_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
