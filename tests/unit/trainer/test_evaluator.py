"""Validation: means by data source, failures dropped, and a warning if everything is 0."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from verl.trainer.evaluator import Evaluator
from verl.types import Failed, SampleHandle

pytestmark = pytest.mark.unit


def sample(score: float, answer: str = "", *, cut: bool = False, failure: Failed | None = None) -> SampleHandle:
    return SampleHandle(
        ref=None,
        group=0,
        tokens=4,
        generated=2,
        score=score,
        version=0,
        finish_reason="length" if cut else "stop",
        failure=failure,
        final_answer=answer,
    )


def evaluator(samples: list[list[SampleHandle]], sources: list[str], batch: int | None = None) -> Evaluator:
    async def answer(row: int) -> list[SampleHandle]:
        return samples[row]

    async def preview(source: str) -> str:
        return f"my_reward.py:compute_score gave 0 to an answer to {source}"

    return Evaluator(answer, sources, batch=batch, preview=preview)


async def test_means_are_by_data_source_and_over_all() -> None:
    samples = [[sample(1), sample(0)], [sample(1), sample(1)], [sample(0), sample(1)]]
    for batch in (None, 1, 2):
        validation = evaluator(samples, ["a", "b", "a"], batch)
        found = await validation.evaluate()
        assert found.pop("timing_s/validation") >= 0
        assert found == {
            **{"val/a/mean@2": 0.5, "val/b/mean@2": 1.0, "val/all/mean@2": 4 / 6},
            **{"val/a/pass@2": 1.0, "val/b/pass@2": 1.0, "val/a/maj@2": 0.5, "val/b/maj@2": 1.0},
        }
        assert validation.warnings == []


async def test_several_answers_give_pass_at_k_of_the_prompts_that_have_so_many() -> None:
    failed = sample(math.nan, failure=Failed("error", "it raised"))
    answers = [[sample(1), sample(0), sample(0), sample(0)], [sample(0), sample(0), sample(0), failed]]
    found = await evaluator(answers, ["all", "all"]).evaluate()
    assert {name: value for name, value in found.items() if "pass" in name} == {
        "val/all/pass@2": pytest.approx((0.5 + 0.0) / 2),
        "val/all/pass@4": 1.0,
    }


async def test_any_number_of_responses_gives_pass_at_n_and_the_score_of_the_majority() -> None:
    samples = [
        [sample(1, "4"), sample(1, "4"), sample(0, "5")],
        [sample(1, "4"), sample(0, "5"), sample(0, "5")],
        [sample(0, "4"), sample(0, "5"), sample(1, "6")],
    ]
    metrics = await evaluator(samples, ["sums"] * 3).evaluate()
    assert metrics["val/sums/pass@3"] == 1.0
    assert metrics["val/sums/pass@2"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    assert metrics["val/sums/maj@3"] == pytest.approx((1 + 0 + 1 / 3) / 3)


async def test_unscored_responses_are_dropped_and_counted() -> None:
    failed = sample(math.nan, failure=Failed("error", "it raised"))
    validation = evaluator([[sample(1)], [failed]], ["a", "a"])
    found = await validation.evaluate()
    assert (found["val/a/mean@1"], found["val/unscored"]) == (1.0, 1.0)
    assert validation.warnings == ["validation: 1 responses could not be scored; it raised"]
    nothing = evaluator([[failed]], ["a"])
    assert math.isnan((await nothing.evaluate())["val/a/mean@1"])
    assert len(nothing.warnings) == 1


async def test_a_source_whose_responses_all_score_0_is_reported_once_with_an_example() -> None:
    validation = evaluator([[sample(0)], [sample(1)], [sample(0, cut=True)]], ["a", "b", "a"])
    await validation.evaluate()
    [warning] = validation.warnings
    assert warning.startswith(
        "validation: all 2 responses to data source 'a' got 0. my_reward.py:compute_score gave 0 to an answer to a. "
        "1 of them were truncated: try a larger data.max_response_length. "
    )
    assert "verl data" in warning
    await validation.evaluate()
    assert validation.warnings == []


async def test_the_branches_of_an_episode_are_one_response() -> None:
    branched = [replace(sample(0.0), index=0, branches=3)] * 3 + [replace(sample(1.0), index=1)]
    found = await evaluator([branched], ["game"]).evaluate()
    assert found["val/game/mean@2"] == 0.5
    assert {"val/game/pass@2", "val/game/maj@2"} <= found.keys()
    assert not any("@4" in name or "@3" in name for name in found)
