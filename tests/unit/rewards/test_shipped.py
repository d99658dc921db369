"""Every data source that a shipped scorer is said to know leads to a function of the contract."""

import inspect
from importlib import import_module

import pytest

from verl.rewards.reward_function import BUILTIN_SCORERS

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("module", sorted(set(BUILTIN_SCORERS.values())))
def test_a_shipped_scorer_takes_what_every_reward_function_takes(module: str) -> None:
    parameters = list(inspect.signature(import_module(module).compute_score).parameters)
    assert parameters[:4] == ["data_source", "solution_str", "ground_truth", "extra_info"]
