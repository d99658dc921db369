"""The interface of a reward model, what is true of all of them, and a fake.

A reward model reads whole conversations as token ids and gives each a number. Answers come one by one, whenever an
episode ends; a `Batcher` puts those together that wait, so that a model is asked for many at once.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from verl.errors import ProcessLostError
from verl.types import FailureKind

__all__ = ["Batcher", "FakeRewardModel", "RewardModel", "ScoringFailure", "unreadable"]

SETTING = "reward.reward_model"


class RewardModel(Protocol):
    """A model that scores. Token ids in, numbers out; what a sequence gets does not depend on what is beside it."""

    async def start(self) -> None:
        """Load the model; a `ConfigError` names what is wrong with it. Returns when it can score."""
        ...

    def refuses(self, token_ids: Sequence[int]) -> str | None:
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
    what: str
    mend: str


def unreadable(token_ids: Sequence[int], limit: int | None, vocabulary: int) -> str | None:
    """What is wrong with a sequence for a model of so many positions and tokens; None when nothing is."""
    if not token_ids:
        return "there is no token to read"
    if limit is not None and len(token_ids) > limit:
        return f"has {len(token_ids):,} tokens, and the model reads at most {limit:,}"
    if max(token_ids) >= vocabulary:
        return f"holds token {max(token_ids)}, and the model knows {vocabulary:,}"
    return None


class Batcher:
    """Asks a model for what arrived while it was busy, at most `size` sequences at once.

    The deadline of a sequence runs from the start of its batch: waiting is not counted. A batch that fails is asked for
    again one by one, so that one sequence cannot fail the others. Of a model that is lost, everybody is told.
    """

    def __init__(self, model: RewardModel, size: int, deadline_s: float) -> None:
        self._model, self._size, self._deadline_s = model, size, deadline_s
        self._waiting: deque[tuple[Sequence[int], asyncio.Future[float | ScoringFailure]]] = deque()
        self._work: asyncio.Task[None] | None = None

    async def score(self, token_ids: Sequence[int]) -> float | ScoringFailure:
        """The model's number for one sequence, or why there is none; never raises for what one sequence did.

        `ProcessLostError`: the model is lost.
        """
        why = self._model.refuses(token_ids)
        if why is not None:
            return ScoringFailure("error", f"the conversation {why}", _SHORTER)
        future: asyncio.Future[float | ScoringFailure] = asyncio.get_running_loop().create_future()
        self._waiting.append((token_ids, future))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
            outcomes: list[float | ScoringFailure] = [self._late()] * len(batch)
            lost: ProcessLostError | None = None
            try:
                await asyncio.wait_for(self._fill(outcomes, [tokens for tokens, _ in batch]), self._deadline_s)
            except asyncio.TimeoutError:  # those that it did not come to are late
                pass
            except ProcessLostError as error:
                lost = error
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                if future.done():  # nobody waits any more for one that was cancelled
                    continue
                if lost is None:
                    future.set_result(outcome)
                else:
                    future.set_exception(lost)

    async def _fill(self, outcomes: list[float | ScoringFailure], batch: Sequence[Sequence[int]]) -> None:
        try:
            scores = await self._model.score(batch)
            outcomes[:] = [_checked(score) for score, _ in zip(scores, batch, strict=True)]
        except ProcessLostError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a model of the user's own raises is told as it is
            if len(batch) == 1:
                outcomes[0] = ScoringFailure("error", f"raised {type(error).__name__}: {error}", _FEWER)
                return
            for place, tokens in enumerate(batch):
                alone: list[float | ScoringFailure] = [self._late()]
                await self._fill(alone, [tokens])
                outcomes[place] = alone[0]

    def _late(self) -> ScoringFailure:
        return ScoringFailure("timeout", f"gave no score within its deadline of {self._deadline_s:g} s", _LONGER)


_SHORTER = "lower data.max_prompt_length or data.max_response_length, or take a reward model that reads more"
_FEWER = f"if it lacks memory, lower {SETTING}.micro_batch_size_per_gpu"
_LONGER = f"give it longer with reward.deadline_s, or fewer at once with {SETTING}.micro_batch_size_per_gpu"


def _checked(score: float) -> float | ScoringFailure:
    if math.isfinite(score):
        return score
    return ScoringFailure(
        "invalid", f"gave {score} as the score", "the model's weights or its type cannot hold this answer"
    )


class FakeRewardModel:
    """A reward model without a model: the mean of the token ids. For tests, and to try a run without weights."""

    def __init__(self, limit: int = 128, vocabulary: int = 64) -> None:
        self.limit, self.vocabulary = limit, vocabulary

    async def start(self) -> None:
        """Nothing to load."""

    def refuses(self, token_ids: Sequence[int]) -> str | None:
        return unreadable(token_ids, self.limit, self.vocabulary)

    async def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
        return [sum(tokens) / len(tokens) for tokens in batch]

    async def close(self) -> None:
        """Nothing runs outside this process."""
