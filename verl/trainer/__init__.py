"""Reinforcement learning: the step (`rl_trainer`), the loop around it (`train_loop`), generation ahead of training
(`buffer`), validation (`evaluator`), and the objects of a run from its settings (`build`). Imports neither Ray nor
torch; imported by sft, demo and commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.trainer.api import TrainingConfig

__all__ = ["TrainingConfig"]


def __getattr__(name: str) -> Any:
    """Import on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.trainer.api import TrainingConfig

    return TrainingConfig
