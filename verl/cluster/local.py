"""A cluster within one process, without Ray: actors are objects, and references hold their values.

Everything runs on the thread of the event loop, so that a breakpoint stops the whole run.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator
from typing import Any


class LocalRef:
    """A reference: the value itself, or the exception that was raised instead."""

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
    """An object with the interface of Ray's handles: `actor.method.remote(...)` returns an awaitable.

    Every public name is a method of the instance, so this class has none itself.
    """

    def __init__(self, instance: Any) -> None:
        self._instance = instance

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(getattr(self._instance, name))

    def _exit(self) -> None:
        """Do what the exit of a process does: leave the process group that the actor has joined."""
        if (leave := getattr(self._instance, "leave", None)) is not None:
            leave()


class _Method:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *args: Any) -> Any:
        """Run a plain method, or start a coroutine."""
        try:
            result = self._function(*args)
        except Exception as error:  # noqa: BLE001 - raised where the reference is awaited, as between processes
            return LocalRef(error=error)
        return asyncio.ensure_future(result) if inspect.isawaitable(result) else LocalRef(result)


class LocalPool:
    """A pool with one device, this process, on which all actors are."""

    count = 1

    def spawn(self, actor: type, *args: Any, **_: Any) -> LocalActor:
        return LocalActor(actor(*args))

    def is_one_machine(self) -> bool:
        return True


def detect_local_device() -> str:
    """Return "cuda" if this machine has a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
