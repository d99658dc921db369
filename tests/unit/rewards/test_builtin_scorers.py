"""Every built-in scorer has the signature of a reward function."""

import inspect
from importlib import import_module

import pytest

from verl.rewards.reward_function import BUILTIN_SCORERS

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("module", sorted(set(BUILTIN_SCORERS.values())))
def test_a_built_in_scorer_takes_the_arguments_of_reward_functions(module: str) -> None:
    parameters = list(inspect.signature(import_module(module).compute_score).parameters)
    assert parameters[:4] == ["data_source", "solution_str", "ground_truth", "extra_info"]
