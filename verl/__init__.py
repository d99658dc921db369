"""verl makes language models better by reinforcement learning: the same program on a laptop and on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.trainer.api import GRPOTrainer, PPOTrainer, Training, TrainingConfig, TrainResult

__version__ = "0.1.0"

__all__ = ["GRPOTrainer", "PPOTrainer", "TrainResult", "Training", "TrainingConfig", "__version__"]


def __getattr__(name: str) -> Any:
    """What trains is imported when it is asked for: the command line shows its help at once."""
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import verl.trainer.api

    return getattr(verl.trainer.api, name)
