"""Scores responses in the current process, one after another, for debugging; `pool.py` is for training."""

from __future__ import annotations

import bdb
import inspect
import math
from typing import Any

from verl.rewards.result import RewardInput, RewardResult
from verl.rewards.reward_function import RewardFunction
from verl.rewards.settings import RewardFunctionSettings


class InProcessRewards:
    """The interface of `RewardPool`, with the function on the caller's thread: it may stop at a breakpoint."""

    deadline_s = math.inf

    def __init__(self, settings: RewardFunctionSettings) -> None:
        self._settings = settings

    async def start(self) -> None:
        """Load the function; raise a `RewardError` if that fails."""
        self._reward = RewardFunction.load(self._settings)

    async def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> RewardResult:
        """Score one response. Quitting the debugger ends the run."""
        requests = [RewardInput(data_source, solution_str, ground_truth, extra_info)]
        try:
            returned = self._reward.call(requests)
            returned = await returned if inspect.isawaitable(returned) else returned
        except bdb.BdbQuit:
            raise
        except Exception as error:  # noqa: BLE001 - a failure of the user's function is a result
            return self._reward.to_failures(error, requests)[0]
        return self._reward.to_results(returned, requests)[0]

    def close(self) -> None:
        """Do nothing: there are no other processes."""

    def __enter__(self) -> InProcessRewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
