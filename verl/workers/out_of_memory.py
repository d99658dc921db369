"""Out-of-memory errors of train workers, with the settings that help."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from verl.errors import EngineError
from verl.workers.base import BaseTrainWorker

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W", bound=BaseTrainWorker)


def explain_out_of_memory(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Re-raise an out-of-memory error of a worker's method as an `EngineError` that names settings to change."""

    @wraps(method)
    def explained(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        import torch

        try:
            return method(self, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            reason = str(error).partition("\n")[0]
            raise EngineError(
                f"train worker {self._rank}: {method.__name__}: out of device memory: {reason}\n"
                f"{self._settings.memory_advice}"
            ) from error

    return explained
