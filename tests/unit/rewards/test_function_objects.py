"""Reward functions given as Python objects: packing them, calling them by name, and scoring in this process."""

import bdb
import threading
from collections.abc import Callable
from typing import Any

import pytest

from verl.errors import RewardError
from verl.rewards.pool.pool import RewardClient, RewardPool, open_rewards
from verl.rewards.reward_function import RewardFunction, pack_function, unpack_function
from verl.rewards.settings import RewardFunctionSettings
from verl.types import Failed, Scored

pytestmark = pytest.mark.unit


def open_here(path: str, function: Callable[..., Any], batch_size: int | None = None) -> RewardClient:
    return open_rewards(RewardFunctionSettings(path, function=function, batch_size=batch_size, workers=0))


def exact(response: str, ground_truth: str) -> float:
    return float(response == ground_truth)


def test_a_function_is_packed_by_value_with_all_it_refers_to() -> None:
    bonus = 0.5
    sent = pack_function(lambda response, ground_truth: exact(response, ground_truth) + bonus)
    assert unpack_function(sent)(response="4", ground_truth="4") == 1.5


def test_a_function_that_cannot_be_pickled_is_an_error_with_a_fix() -> None:
    lock = threading.Lock()
    with pytest.raises(RewardError, match=r"cannot be sent .*inside the function"):
        pack_function(lambda response: lock.locked())


async def test_a_function_object_replaces_a_file() -> None:
    reward = RewardFunction.load(RewardFunctionSettings("python:exact", "exact", function=pack_function(exact)))
    assert reward.label == "python:exact:exact"
    assert await reward.score("", "4", "4") == (1.0, {})


async def test_an_async_function_is_awaited() -> None:
    async def later(response: str) -> float:
        return len(response)

    reward = RewardFunction.load(RewardFunctionSettings("python:later", "later", function=later))
    assert reward.is_async
    assert await reward.score("", "abc", None) == (3.0, {})


async def test_without_processes_a_function_is_called_here() -> None:
    seen: list[Any] = []
    here = open_here("python:f", lambda response: seen.append(response) or 1.0)
    assert not isinstance(here, RewardPool)
    await here.start()
    assert await here.score("", "abc", None) == Scored(1.0)
    assert seen == ["abc"]


async def test_a_failure_here_is_a_result_and_quitting_the_debugger_ends_the_run() -> None:
    def strange(response: str) -> float:
        if response == "quit":
            raise bdb.BdbQuit
        return 1 / len(response)

    here = open_here("python:strange", strange)
    await here.start()
    outcome = await here.score("", "", None)
    assert isinstance(outcome, Failed)
    assert "ZeroDivisionError" in outcome.message
    assert outcome.message.count("File ") == 1, "the traceback begins with the user's own line"
    with pytest.raises(bdb.BdbQuit):
        await here.score("", "quit", None)


async def test_a_batched_function_gets_lists_here_too() -> None:
    def together(data_sources: Any, solution_strs: list[str], ground_truths: Any, extra_infos: Any) -> list[int]:
        return [len(one) for one in solution_strs]

    here = open_here("python:together", together, batch_size=4)
    await here.start()
    assert await here.score("", "abc", None) == Scored(3.0)
