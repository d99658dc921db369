"""torch.compile for pure functions, falling back to the plain function if compilation fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class Compiled(Generic[P, T]):
    """A function compiled at its first call, for all shapes. It must not change its arguments.

    If compilation fails, for lack of a C++ compiler, CUDA headers or a matching Triton, the plain function runs from
    then on, and `error` says why.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        self._plain = function
        self._compiled: Callable[P, T] = torch.compile(function, dynamic=True)
        self.error: str | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.error is None:
            try:
                return self._compiled(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - compilers fail in many ways; errors of the function recur below
                self.error = f"{type(error).__name__}: {_first_line(error)}"
        return self._plain(*args, **kwargs)


def _first_line(error: BaseException) -> str:
    """Return the first line of an error: torch's messages about compilers go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"
