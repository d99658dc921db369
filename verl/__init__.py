"""Reinforcement learning for language models: the same program on a laptop and on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.agents.tools import tool
    from verl.trainer.api import GRPOTrainer, PPOTrainer, Training, TrainingConfig, TrainResult

__version__ = "0.1.0"

__all__ = ["GRPOTrainer", "PPOTrainer", "TrainResult", "Training", "TrainingConfig", "__version__", "tool"]


def __getattr__(name: str) -> Any:
    """Import lazily, so that the command line starts fast."""
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "tool":
        from verl.agents.tools import tool

        return tool
    import verl.trainer.api

    return getattr(verl.trainer.api, name)
