"""Batching of sequences that wait for a reward model: episodes end one by one, a model scores many at once."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence

from verl.errors import ProcessLostError
from verl.rewards.models.interface import SETTING, RewardModel, ScoringFailure

__all__ = ["Batcher"]


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
        why = self._model.check_input(token_ids)
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
