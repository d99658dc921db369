"""The RL loop and its stages: the step (`loop`), what feeds it (`buffer`), validation (`evaluate`), and the one place
that turns settings into objects (`build`). Knows no Ray and no torch; imported by demo and cli."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.trainer.api import TrainingConfig

__all__ = ["TrainingConfig"]


def __getattr__(name: str) -> Any:
    """Late, as in `verl` itself."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.trainer.api import TrainingConfig

    return TrainingConfig
