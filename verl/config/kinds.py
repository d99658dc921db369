"""The kinds of runs that there are settings for: what can be set, how else it may be spelled, what is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from verl.config import checks, sft_checks
from verl.config.aliases import OF_SFT, OF_TRAIN, Spellings
from verl.config.findings import Finding
from verl.config.schema import Config, Section, SftConfig

__all__ = ["ANSWERS", "KINDS", "SFT", "TRAIN", "AnyKind", "Kind"]

C = TypeVar("C", bound=Section)
Check = Callable[[C], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Kind(Generic[C]):
    """`command` is the one of `verl` that runs it."""

    command: str
    root: type[C]
    spellings: Spellings
    missing: Check[C]
    contradictions: Check[C]
    hints: Check[C]


TRAIN = Kind("train", Config, OF_TRAIN, checks.missing, checks.contradictions, checks.hints)
SFT = Kind("sft", SftConfig, OF_SFT, sft_checks.missing, sft_checks.contradictions, sft_checks.hints)
ANSWERS = Kind("generate", Config, OF_TRAIN, checks.missing, checks.of_answers, checks.answer_hints)
"""Of the commands that write and score answers with the settings of training: what they do not use is not checked."""
AnyKind = Kind[Config] | Kind[SftConfig]
KINDS: tuple[AnyKind, ...] = (TRAIN, SFT)
