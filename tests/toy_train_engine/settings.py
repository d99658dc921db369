"""Settings of the toy engine: those that all engines have."""

from dataclasses import dataclass
from typing import ClassVar

from verl.training.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class ToySettings(EngineSettings):
    engine: ClassVar[str] = "toy"
