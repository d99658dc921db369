"""The three ways in which an episode goes wrong: by the model's mistake, at a limit, by a failure around it."""

from __future__ import annotations


class ToolError(Exception):
    """A mistake of the model in a call, to be raised by tools: the model reads the message and may try again."""


class EpisodeLimitError(Exception):
    """The tokens, turns or time of an episode are used up: it ends here, is scored, and marked as truncated."""


class ToolFailureError(Exception):
    """A tool or environment could not be run, not by the model's fault: the episode is repeated, then left out."""


def classify_error(error: BaseException) -> ToolError | ToolFailureError:
    """Return whether an exception of a tool is a mistake of the model, which chose the arguments, or a failure."""
    if isinstance(error, (ToolError, ToolFailureError)):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (OSError, EOFError)):  # also every ConnectionError and TimeoutError
        return ToolFailureError(text)
    return ToolError(text)
