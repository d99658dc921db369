"""Batching of requests to a reward model: episodes end one by one, a model scores many sequences at once."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence

from verl.errors import ProcessLostError
from verl.rewards.models.interface import SETTING, RewardModel, ScoringFailure

_SHORTEN = "lower data.max_prompt_length or data.max_response_length, or use a reward model with a longer context"
_REDUCE_BATCH = f"if it is out of memory, lower {SETTING}.micro_batch_size_per_gpu"
_WAIT_LONGER = f"increase reward.deadline_s, or lower {SETTING}.micro_batch_size_per_gpu"
_NOT_FINITE = "check the model's weights and its dtype: they overflow on this response"


class Batcher:
    """Scores the sequences that arrived while the model was busy, at most `size` at once.

    The timeout starts with the batch of a sequence: waiting does not count. A batch that fails is repeated one by one,
    so that one sequence cannot fail the others. If the model is lost, all its pending calls fail.
    """

    def __init__(self, model: RewardModel, size: int, timeout_s: float) -> None:
        self._model, self._size, self._timeout_s = model, size, timeout_s
        self._pending: deque[tuple[Sequence[int], asyncio.Future[float | ScoringFailure]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def score(self, token_ids: Sequence[int]) -> float | ScoringFailure:
        """Return the score of one sequence, or why it has none; raise a `ProcessLostError` if the model is lost."""
        problem = self._model.check_input(token_ids)
        if problem is not None:
            return ScoringFailure("error", f"the conversation {problem}", _SHORTEN)
        future: asyncio.Future[float | ScoringFailure] = asyncio.get_running_loop().create_future()
        self._pending.append((token_ids, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        while self._pending:
            batch = [self._pending.popleft() for _ in range(min(self._size, len(self._pending)))]
            results: list[float | ScoringFailure] = [self._timeout()] * len(batch)
            lost: ProcessLostError | None = None
            try:
                await asyncio.wait_for(self._score_batch(results, [tokens for tokens, _ in batch]), self._timeout_s)
            except TimeoutError:  # sequences without a result keep their timeout
                pass
            except ProcessLostError as error:
                lost = error
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # cancelled
                    continue
                if lost is None:
                    future.set_result(result)
                else:
                    future.set_exception(lost)

    async def _score_batch(self, results: list[float | ScoringFailure], batch: Sequence[Sequence[int]]) -> None:
        """Fill `results` as far as the timeout allows."""
        try:
            scores = await self._model.score(batch)
            results[:] = [_check_score(score) for score, _ in zip(scores, batch, strict=True)]
        except ProcessLostError:
            raise
        except Exception as error:  # noqa: BLE001 - a custom model may raise anything
            if len(batch) == 1:
                results[0] = ScoringFailure("error", f"raised {type(error).__name__}: {error}", _REDUCE_BATCH)
                return
            for index, tokens in enumerate(batch):
                single: list[float | ScoringFailure] = [self._timeout()]
                await self._score_batch(single, [tokens])
                results[index] = single[0]

    def _timeout(self) -> ScoringFailure:
        return ScoringFailure("timeout", f"returned no score within {self._timeout_s:g} s", _WAIT_LONGER)


def _check_score(score: float) -> float | ScoringFailure:
    return score if math.isfinite(score) else ScoringFailure("invalid", f"returned {score} as the score", _NOT_FINITE)
