"""The run types: the settings, aliases and checks of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from verl.config import validation
from verl.config.aliases import SFT_ALIASES, TRAIN_ALIASES, Aliases
from verl.config.schema import Config, Section, SftConfig

C = TypeVar("C", bound=Section)
Check = Callable[[C], Iterator[str]]


@dataclass(frozen=True, slots=True)
class RunType(Generic[C]):
    """A type of run; `command` is the `verl` command that starts it."""

    command: str
    root: type[C]
    aliases: Aliases
    find_conflicts: Check[C]
    find_hints: Check[C]


TRAIN = RunType("train", Config, TRAIN_ALIASES, validation.find_conflicts, validation.find_hints)
SFT = RunType("sft", SftConfig, SFT_ALIASES, validation.find_sft_conflicts, validation.find_sft_hints)
GENERATE = RunType(
    "generate", Config, TRAIN_ALIASES, validation.find_generation_conflicts, validation.find_generation_hints
)
"""Commands that generate and score responses with the training settings; only the settings they use are checked."""
AnyRunType = RunType[Config] | RunType[SftConfig]
RUN_TYPES: tuple[AnyRunType, ...] = (TRAIN, SFT)
