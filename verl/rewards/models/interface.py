"""The interface of a reward model, which scores whole conversations as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from verl.types import FailureKind

SETTING = "reward.reward_model"


class RewardModel(Protocol):
    """A model that scores sequences of token ids. A score does not depend on the other sequences of its batch."""

    async def start(self) -> None:
        """Load the model; raise a `ConfigError` if that is not possible."""
        ...

    def check_input(self, token_ids: Sequence[int]) -> str | None:
        """Return why the model cannot score this sequence; None if it can."""
        ...

    async def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
        """Return one score per sequence; raise a `ProcessLostError` if a process of the model has died."""
        ...

    async def close(self) -> None:
        """Release the model, and end every process that it started."""
        ...


@dataclass(frozen=True, slots=True)
class ScoringFailure:
    """Why a sequence has no score, and how to fix that."""

    kind: FailureKind
    message: str
    fix: str


def check_tokens(token_ids: Sequence[int], limit: int | None, vocabulary: int) -> str | None:
    """Return why a model of `limit` positions and `vocabulary` tokens cannot score a sequence; None if it can."""
    if not token_ids:
        return "has no tokens"
    if limit is not None and len(token_ids) > limit:
        return f"has {len(token_ids):,} tokens, more than the {limit:,} that the model supports"
    if max(token_ids) >= vocabulary:
        return f"contains token {max(token_ids)}, outside the model's vocabulary of {vocabulary:,}"
    return None
