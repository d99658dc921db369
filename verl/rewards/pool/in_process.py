"""Scores answers in this process, one after the other: for debugging. See `pool.py` for what training uses."""

from __future__ import annotations

import bdb
import inspect
import math
from collections.abc import Mapping
from typing import Any

from verl.rewards.result import RewardInput, RewardResult
from verl.rewards.reward_function import load_reward

__all__ = ["InProcessRewards"]


class InProcessRewards:
    """As a `RewardPool`, but the function runs on the caller's thread: it may stop at a breakpoint for ever."""

    def __init__(self, reward: Mapping[str, Any], *, batch_size: int | None = None, **_: Any) -> None:
        self._arguments = dict(reward) | ({"batched": True} if batch_size else {})
        self.deadline_s = math.inf

    async def start(self) -> None:
        """Load the function; a `RewardError` when that fails."""
        self._reward = load_reward(**self._arguments)

    async def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> RewardResult:
        """The outcome of one answer. Whoever leaves the debugger leaves the run."""
        answer = RewardInput(data_source, solution_str, ground_truth, extra_info)
        batched = self._reward.batched
        try:
            result = self._reward.call_batch([answer]) if batched else self._reward.call(answer)
            result = await result if inspect.isawaitable(result) else result
        except bdb.BdbQuit:
            raise
        except Exception as error:  # noqa: BLE001 - the user's own function: its failure is told, not raised
            return self._reward.make_error(error, answer)
        return self._reward.to_results(result, [answer])[0] if batched else self._reward.to_result(result, answer)

    def close(self) -> None:
        """Nothing runs but this process."""

    def __enter__(self) -> InProcessRewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
