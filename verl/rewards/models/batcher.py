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

_Request = tuple[Sequence[int], asyncio.Future[float | ScoringFailure]]
"""The tokens of a sequence, and the future of its score."""


class Batcher:
    """Scores the sequences that arrived while the model was busy, at most `size` at once.

    The timeout starts with the batch of a sequence: waiting does not count. A batch that fails is repeated one by one,
    so that one sequence cannot fail the others. If the model is lost, all its pending calls fail.
    """

    def __init__(self, model: RewardModel, size: int, timeout_s: float) -> None:
        self._model, self._size, self._timeout_s = model, size, timeout_s
        self._pending: deque[_Request] = deque()
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
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._score_batch(batch)
            except TimeoutError:
                late = ScoringFailure("timeout", f"returned no score within {self._timeout_s:g} s", _WAIT_LONGER)
                _settle(batch, [late] * len(batch))
            except ProcessLostError as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)

    async def _score_batch(self, batch: Sequence[_Request]) -> None:
        try:
            scores = await self._model.score([tokens for tokens, _ in batch])
            _settle(batch, [_check_score(score) for score, _ in zip(scores, batch, strict=True)])
        except ProcessLostError:
            raise
        except Exception as error:  # noqa: BLE001 - a custom model may raise anything
            if len(batch) == 1:
                _settle(batch, [ScoringFailure("error", f"raised {type(error).__name__}: {error}", _REDUCE_BATCH)])
                return
            for request in batch:
                await self._score_batch([request])


def _settle(batch: Sequence[_Request], results: Sequence[float | ScoringFailure]) -> None:
    """Set the results of requests that have none yet and were not cancelled."""
    for (_, future), result in zip(batch, results, strict=True):
        if not future.done():
            future.set_result(result)


def _check_score(score: float) -> float | ScoringFailure:
    return score if math.isfinite(score) else ScoringFailure("invalid", f"returned {score} as the score", _NOT_FINITE)
