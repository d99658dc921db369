"""Thin Ray actors around engines and episodes, and the clients through which the trainer calls them. The logic is one
layer down (training, rollout, agents). Imported by trainer.

`in_process` has the same engines within the user's process, for custom training loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.workers.in_process import Rollout, RolloutWorker, TrainerWorker

__all__ = ["Rollout", "RolloutWorker", "TrainerWorker"]


def __getattr__(name: str) -> Any:
    """Import on demand: actors do not need them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.workers import in_process

    return getattr(in_process, name)
