"""Scores responses in worker processes, or in this process. A failure is a `Failed`, never a score of 0."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

from verl.rewards.pool.process_pool import ProcessPool
from verl.rewards.result import Failed, RewardInput, RewardResult, Scored, make_failure
from verl.rewards.reward_function import RewardFunction
from verl.rewards.settings import RewardFunctionSettings
from verl.types import FailureKind


@dataclass(frozen=True, slots=True)
class RewardJob:
    """A reward function, as a job of a process pool."""

    settings: RewardFunctionSettings
    is_repeatable = True

    @property
    def label(self) -> str:
        return self.settings.label

    @property
    def batch_size(self) -> int | None:
        return self.settings.batch_size if self.settings.is_batched else None

    def load(self) -> RewardFunction:
        return RewardFunction.load(self.settings)

    def fail(self, kind: FailureKind, cause: str, request: RewardInput) -> RewardResult:
        return make_failure(kind, self.label, cause, request)

    def encode(self, result: RewardResult) -> dict[str, Any]:
        if isinstance(result, Scored):
            return {"score": result.score, "metrics": result.metrics}
        return {"failed": result.kind, "message": result.message}

    def decode(self, message: dict[str, Any]) -> RewardResult:
        if "failed" in message:
            return Failed(message["failed"], message["message"])
        return Scored(message["score"], message["metrics"])


class RewardPool(ProcessPool[RewardInput, RewardResult]):
    """Worker processes that score responses."""

    def __init__(self, settings: RewardFunctionSettings) -> None:
        super().__init__(RewardJob(settings), settings.workers, settings.timeout_s, settings.memory_mb)

    async def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> RewardResult:
        """Score one response; raise a `RewardError` only if the function can no longer be loaded."""
        return await asyncio.wrap_future(self.submit(RewardInput(data_source, solution_str, ground_truth, extra_info)))


class InProcessRewards:
    """The interface of `RewardPool`, with the function on the caller's thread: it may stop at a breakpoint."""

    timeout_s = math.inf

    def __init__(self, settings: RewardFunctionSettings) -> None:
        self._settings = settings

    async def start(self) -> None:
        self._reward = RewardFunction.load(self._settings)

    async def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> RewardResult:
        return await self._reward.score_request(RewardInput(data_source, solution_str, ground_truth, extra_info))

    def close(self) -> None:
        """Do nothing: there are no other processes."""

    def __enter__(self) -> InProcessRewards:
        return self

    def __exit__(self, *_: object) -> None: ...


RewardClient = RewardPool | InProcessRewards


def open_rewards(settings: RewardFunctionSettings) -> RewardClient:
    """Return a pool of processes; without workers, score in this process, with breakpoints and without limits."""
    return RewardPool(settings) if settings.workers else InProcessRewards(settings)
