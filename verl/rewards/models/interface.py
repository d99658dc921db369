"""The interface of a reward model, what is true of all of them, and a fake.

A reward model reads whole conversations as token ids and gives each a number. Answers come one by one, whenever an
episode ends; a `Batcher` puts those together that wait, so that a model is asked for many at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from verl.types import FailureKind

__all__ = ["SETTING", "FakeRewardModel", "RewardModel", "ScoringFailure", "check_tokens"]

SETTING = "reward.reward_model"


class RewardModel(Protocol):
    """A model that scores. Token ids in, numbers out; what a sequence gets does not depend on what is beside it."""

    async def start(self) -> None:
        """Load the model; a `ConfigError` names what is wrong with it. Returns when it can score."""
        ...

    def check_input(self, token_ids: Sequence[int]) -> str | None:
        """Why the model cannot read this sequence; None when it can."""
        ...

    async def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
        """One number for each sequence; `ProcessLostError` if a process that it needs is gone."""
        ...

    async def close(self) -> None:
        """Let go of the model, and end every process that it started."""
        ...


@dataclass(frozen=True, slots=True)
class ScoringFailure:
    """Why there is no number, and what to do about it. Who knows the sample makes a `Failed` of it."""

    kind: FailureKind
    message: str
    fix: str


def check_tokens(token_ids: Sequence[int], limit: int | None, vocabulary: int) -> str | None:
    """What is wrong with a sequence for a model of so many positions and tokens; None when nothing is."""
    if not token_ids:
        return "there is no token to read"
    if limit is not None and len(token_ids) > limit:
        return f"has {len(token_ids):,} tokens, and the model reads at most {limit:,}"
    if max(token_ids) >= vocabulary:
        return f"holds token {max(token_ids)}, and the model knows {vocabulary:,}"
    return None


class FakeRewardModel:
    """A reward model without a model: the mean of the token ids. For tests, and to try a run without weights."""

    def __init__(self, limit: int = 128, vocabulary: int = 64) -> None:
        self.limit, self.vocabulary = limit, vocabulary

    async def start(self) -> None:
        """Nothing to load."""

    def check_input(self, token_ids: Sequence[int]) -> str | None:
        return check_tokens(token_ids, self.limit, self.vocabulary)

    async def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
        return [sum(tokens) / len(tokens) for tokens in batch]

    async def close(self) -> None:
        """Nothing runs outside this process."""
