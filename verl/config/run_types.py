"""The kinds of runs that there are settings for: what can be set, how else it may be spelled, what is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from verl.config import sft_validation, validation
from verl.config.aliases import SFT_ALIASES, TRAIN_ALIASES, Aliases
from verl.config.problems import ConfigProblem
from verl.config.schema import Config, Section, SftConfig

__all__ = ["GENERATE", "RUN_TYPES", "SFT", "TRAIN", "AnyRunType", "RunType"]

C = TypeVar("C", bound=Section)
Check = Callable[[C], Iterator[ConfigProblem]]


@dataclass(frozen=True, slots=True)
class RunType(Generic[C]):
    """`command` is the one of `verl` that runs it."""

    command: str
    root: type[C]
    aliases: Aliases
    find_missing: Check[C]
    find_conflicts: Check[C]
    find_hints: Check[C]


TRAIN = RunType(
    "train", Config, TRAIN_ALIASES, validation.find_missing, validation.find_conflicts, validation.find_hints
)
SFT = RunType(
    "sft", SftConfig, SFT_ALIASES, validation.find_missing, sft_validation.find_conflicts, sft_validation.find_hints
)
GENERATE = RunType(
    "generate",
    Config,
    TRAIN_ALIASES,
    validation.find_missing,
    validation.find_generation_conflicts,
    validation.find_generation_hints,
)
"""Of the commands that write and score answers with the settings of training: what they do not use is not checked."""
AnyRunType = RunType[Config] | RunType[SftConfig]
RUN_TYPES: tuple[AnyRunType, ...] = (TRAIN, SFT)
