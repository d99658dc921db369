"""Builds training engines by name. Imports no torch until one is built, since the controller uses it too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.config.train_engines import DEFAULT_ENGINE, get_train_engine
from verl.training.settings import EngineSettings

if TYPE_CHECKING:
    from verl.training.engine import TrainEngine


def build_engine(settings: EngineSettings) -> TrainEngine[Any]:
    """Return the model on the ranks of the default process group; see `verl.training.process_group`.

    Depending on `settings.head` it is a `TrainEngine[ModelOutput]` or a `TrainEngine[ValueOutput]`. Collective.
    """
    spec = get_train_engine(settings.engine)
    engine: TrainEngine[Any] = spec.load(spec.engine)(settings)
    return engine


def get_settings_class(name: str = DEFAULT_ENGINE) -> type[EngineSettings]:
    """Return the class of an engine's settings."""
    spec = get_train_engine(name)
    settings_class: type[EngineSettings] = spec.load(spec.settings)
    return settings_class
