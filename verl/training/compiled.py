"""torch.compile for pure functions, without its power to stop a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

__all__ = ["Compiled"]

P = ParamSpec("P")
T = TypeVar("T")


class Compiled(Generic[P, T]):
    """A function that is compiled when it is first called, for all shapes at once. It must not change its arguments.

    Where compiling fails, for want of a C++ compiler, of CUDA's headers or of a Triton that fits, the function runs as
    it is written from then on, and `trouble` says why.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        self._plain = function
        self._compiled: Callable[P, T] = torch.compile(function, dynamic=True)
        self.trouble: str | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.trouble is None:
            try:
                return self._compiled(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - compilers fail in many ways; the function's own errors come again
                self.trouble = f"{type(error).__name__}: {_first_line(error)}"
        return self._plain(*args, **kwargs)


def _first_line(error: BaseException) -> str:
    """The cause in a line: what torch says of a compiler's failure goes on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason was given"
