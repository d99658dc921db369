"""Compilation with torch.compile, for all shapes, with the plain functions to fall back on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.utils.checkpoint import _StopRecomputationError  # ends a layer's recomputation once enough is known

from verl.private_files import get_user_folder

BACKEND = "inductor"
"""The compiler. Tests use one that generates no code."""

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


class Compiler:
    """Compiles functions, each at its first call. They must not change their arguments.

    If that fails for one of them, for lack of a C++ compiler, CUDA headers or a matching Triton, all of them run plain
    from then on, and `error` says why.
    """

    def __init__(self) -> None:
        # Torch would load compiled code from a folder in /tmp that another user may have made.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(get_user_folder() / "torchinductor"))
        self.error: str | None = None

    def compile(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that computes the same."""
        compiled = torch.compile(function, dynamic=True, backend=BACKEND)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if self.error is None:
                try:
                    return compiled(*args, **kwargs)
                except (torch.OutOfMemoryError, _StopRecomputationError):
                    raise
                except Exception as error:  # noqa: BLE001 - compilers fail in many ways; errors of the function recur below
                    self.error = f"{type(error).__name__}: {_shorten(str(error))}"
                    _log.warning("torch.compile failed: %s", self.error)
            return function(*args, **kwargs)

        return call


def _shorten(message: str) -> str:
    """Return the first line of a message of torch, which goes on for pages; two, if the first announces the second."""
    first, *rest = message.strip().splitlines() or ["no reason given"]
    return " ".join([first, *rest[:1]] if first.endswith(":") else [first]).strip()[:300]
