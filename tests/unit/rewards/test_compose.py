"""Several rewards as one: sums of weights, clips, and every part a metric."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.rewards.compose import add_weighted, clip_score
from verl.rewards.reward_function import RewardFunction
from verl.rewards.settings import RewardFunctionSettings

pytestmark = pytest.mark.unit

numbers = st.floats(-1e6, 1e6)


def always(result: Any) -> Any:
    return lambda *args, **kwargs: result


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5))
def test_the_score_is_the_weighted_sum_and_each_part_is_a_metric(parts: Sequence[tuple[float, float]]) -> None:
    found = add_weighted({f"part{i}": (always(score), weight) for i, (score, weight) in enumerate(parts)})("", "", "")
    assert found.pop("score") == pytest.approx(sum(score * weight for score, weight in parts))
    assert list(found.values()) == [score for score, _ in parts]


@given(numbers, st.tuples(numbers, numbers).map(sorted))
def test_clipping_limits_a_score_and_keeps_scores_within_the_limits(score: float, bounds: list[float]) -> None:
    low, high = bounds
    found = clip_score(always(score), low, high)("", "", "")
    assert low <= found <= high
    assert found == score or not low <= score <= high
    assert clip_score(always({"score": score, "raw": score}), low, high)("", "", "") == {"score": found, "raw": score}


async def test_one_async_part_makes_the_whole_async() -> None:
    async def judge(*args: Any) -> float:
        return 4.0

    both = add_weighted(
        {"judge": (clip_score(judge, 0.0, 1.0), 2.0), "form": (always({"score": 1.0, "lines": 3}), 1.0)}
    )
    assert await both("", "", "") == {"score": 3.0, "judge": 1.0, "form": 1.0, "form/lines": 3}


@pytest.mark.parametrize("result", [None, "1.0", float("nan"), {"acc": 1.0}])
def test_a_part_without_a_number_is_named(result: Any) -> None:
    with pytest.raises(ValueError, match="'form'"):
        add_weighted({"form": (always(result), 1.0)})("", "", "")


def functions(folder: Path, *specs: dict[str, Any]) -> list[dict[str, Any]]:
    arguments = "data_source, solution_str, ground_truth, extra_info=None"
    (folder / "parts.py").write_text(
        f"def compute_score({arguments}): return float(solution_str == ground_truth)\n"
        f"async def length({arguments}, scale=1): return scale * len(solution_str)\n"
    )
    return [{"path": str(folder / "parts.py"), **spec} for spec in specs]


async def test_functions_given_as_settings_are_loaded_weighted_and_clipped(tmp_path: Path) -> None:
    specs = functions(tmp_path, {}, {"name": "length", "weight": -0.1, "clip": [0, 10], "reward_kwargs": {"scale": 10}})
    reward = RewardFunction.load(RewardFunctionSettings(functions=[*specs, {"weight": 0.5, "label": "known"}]))
    assert await reward.score("addition", "46", "46") == (0.5, {"parts": 1.0, "length": 10.0, "known": 1.0})
    assert reward.is_async


@pytest.mark.parametrize(
    ("specs", "part"),
    [
        ([{"wieght": 1.0}], "functions[0].wieght: unknown key; known keys: clip,"),
        ([{}, {}], "functions[1]: the metric name 'parts' is already used"),
        ([{"clip": [1, 0]}], "functions[0].clip=[1, 0]: must be [low, high]"),
        ([{"name": "nobody"}], "there is no 'nobody'"),
    ],
)
def test_invalid_settings_are_named(tmp_path: Path, specs: list[dict[str, Any]], part: str) -> None:
    with pytest.raises(RewardError) as caught:
        RewardFunction.load(RewardFunctionSettings(functions=functions(tmp_path, *specs)))
    assert part in str(caught.value)
