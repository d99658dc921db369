"""Errors raised by episodes: a mistake of the model, a limit that is reached, a failure of a tool or environment."""

from __future__ import annotations


class ToolError(Exception):
    """A mistake of the model in a tool call, raised by tools. The model reads the message and may try again."""


class EpisodeLimitError(Exception):
    """The tokens, turns or time of an episode are used up. The episode ends, is scored, and is marked as truncated."""


class ToolFailureError(Exception):
    """A tool or environment failed without a mistake of the model. The episode is repeated once, then discarded."""


class LoopBlockedError(ToolFailureError):
    """Other code blocked the event loop of a call. The episode is repeated, which does not count as an attempt."""


def classify_error(error: BaseException) -> ToolError | ToolFailureError:
    """Convert an exception of a tool: failed I/O is a failure, anything else a mistake in the model's arguments."""
    if isinstance(error, (ToolError, ToolFailureError)):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (OSError, EOFError)):  # also every ConnectionError and TimeoutError
        return ToolFailureError(text)
    return ToolError(text)
