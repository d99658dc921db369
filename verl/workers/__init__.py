"""Thin actors that bind engines and episodes to the cluster, and the clients through which the trainer calls them. The
logic is one layer down (training, rollout, agents); here is only what crosses processes. Imported by trainer.

`standalone` has the same engines for loops of one's own, in the user's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.workers.in_process import Rollout, RolloutWorker, TrainerWorker

__all__ = ["Rollout", "RolloutWorker", "TrainerWorker"]


def __getattr__(name: str) -> Any:
    """Late: whoever starts an actor needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.workers import in_process as standalone

    return getattr(standalone, name)
