"""The kinds of runs that there are settings for: what can be set, how else it may be spelled, what is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from verl.config import checks, sft_checks
from verl.config.aliases import OF_SFT, OF_TRAIN, Aliases
from verl.config.problems import ConfigProblem
from verl.config.schema import Config, Section, SftConfig

__all__ = ["ANSWERS", "KINDS", "SFT", "TRAIN", "AnyRunType", "RunType"]

C = TypeVar("C", bound=Section)
Check = Callable[[C], Iterator[ConfigProblem]]


@dataclass(frozen=True, slots=True)
class RunType(Generic[C]):
    """`command` is the one of `verl` that runs it."""

    command: str
    root: type[C]
    spellings: Aliases
    missing: Check[C]
    contradictions: Check[C]
    hints: Check[C]


TRAIN = RunType("train", Config, OF_TRAIN, checks.missing, checks.contradictions, checks.hints)
SFT = RunType("sft", SftConfig, OF_SFT, sft_checks.missing, sft_checks.contradictions, sft_checks.hints)
ANSWERS = RunType("generate", Config, OF_TRAIN, checks.missing, checks.of_answers, checks.answer_hints)
"""Of the commands that write and score answers with the settings of training: what they do not use is not checked."""
AnyRunType = RunType[Config] | RunType[SftConfig]
KINDS: tuple[AnyRunType, ...] = (TRAIN, SFT)
