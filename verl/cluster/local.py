"""A cluster of one process, without Ray: actors are objects, and references are what they refer to.

All of it happens on the thread of the event loop, one thing after the other: a breakpoint anywhere stops the whole run.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator
from typing import Any

__all__ = ["LocalActor", "LocalPool", "LocalRef", "detect_local_device"]


class LocalRef:
    """What a reference is here: the thing itself, or what was raised instead of it."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self._value, self._error = value, error

    def get(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self.get()


class LocalActor:
    """An object that is called as Ray's handles are: `actor.method.remote(...)` gives what can be awaited."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(getattr(self._made, name))

    def end(self) -> None:
        """As a process ends: what it has joined is left."""
        if (leave := getattr(self._made, "leave", None)) is not None:
            leave()


class _Method:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *args: Any) -> Any:
        """A plain method has run when this returns, a coroutine has begun."""
        try:
            result = self._function(*args)
        except Exception as error:  # noqa: BLE001 - it is for who awaits it, as between processes
            return LocalRef(error=error)
        return asyncio.ensure_future(result) if inspect.isawaitable(result) else LocalRef(result)


class LocalPool:
    """The devices of a run in one process: there is one, and all actors sit on it."""

    count = 1

    def spawn(self, actor: type, *args: Any, **_: Any) -> LocalActor:
        return LocalActor(actor(*args))

    def close(self) -> None:
        """Nothing was reserved."""


def detect_local_device() -> str:
    """ "cuda" where this machine has a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
