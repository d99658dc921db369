"""A recorded batch is read as it was written, and plans of several ranks become one."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.policy_steps import SAMPLES, Table, step_of
from verl.config.batch_sizes import BatchSizes
from verl.data.plan import Planner, RankPlan
from verl.training.policy.recorded_step import merge_plans, read_batch, write_step
from verl.training.policy.trainer import PolicyTrainer
from verl.types import Sample, SampleHandle

pytestmark = pytest.mark.unit

FULL = replace(
    SAMPLES[0],
    metrics={"a.b": 1.5, "format": 1.0},
    baseline=0.25,
    routed_experts=np.arange(12, dtype=np.int16).reshape(3, 2, 2),
    teacher_prompt=np.array([1, 2], np.int32),
    engines=frozenset({3, 1}),
    turn_rewards=((2, 0.5),),
    turns=((2, 0, 0.5, 0), (4, 1, 0.0, 1)),
    branches=2,
    shares=np.full(len(SAMPLES[0].tokens), 0.5, np.float32),
    episode_tokens=4,
    index=3,
    kept_ids=np.arange(6, dtype=np.int32).reshape(3, 2),
    times=(1.0, 2.0, 3.0),
)


def assert_same(written: Any, read: Any, what: str) -> None:
    assert type(read) is type(written), what
    if isinstance(written, np.ndarray):
        assert read.dtype == written.dtype, what
        assert np.array_equal(written, read), what
    else:
        assert read == written, what


@pytest.mark.parametrize("samples", [SAMPLES, [FULL, *SAMPLES[1:]], [FULL] * 2, []])
def test_samples_are_read_as_they_were_written(tmp_path: Path, samples: list[Sample]) -> None:
    plan = step_of(SAMPLES, prompts=1, micro=2, epochs=2).plan
    plan = replace(plan, branches=np.ones(len(plan)), components={"my.score": np.arange(len(plan), dtype=np.float64)})
    write_step(tmp_path, PolicyTrainer(Table()), samples, plan)
    batch = read_batch(tmp_path)
    assert (batch.ranks, batch.device, len(batch.samples)) == (1, "cpu", len(samples))
    for written, read in zip(samples, batch.samples, strict=True):
        for name in (each.name for each in fields(Sample)):
            assert_same(getattr(written, name), getattr(read, name), name)
    for name in {each.name for each in fields(RankPlan)} - {"refs", "components"}:
        assert_same(getattr(plan, name), getattr(batch.plan, name), name)
    assert_same(plan.components["my.score"], batch.plan.components["my.score"], "components")


def plan_ranks(ranks: int, **sizes: Any) -> list[RankPlan]:
    handles = [SampleHandle(k, k // 3, 3 + k % 5, 2, float(k), 0, index=k % 3) for k in range(21)]
    return Planner(ranks, BatchSizes(2, 2, None, 2), **sizes).plan(handles).ranks


def list_work(plans: list[RankPlan], kind: str) -> list[list[set[tuple[int, int]]]]:
    """Return the micro-batches of each update as sets of responses, whichever rank has them."""
    updates = len(getattr(plans[0], kind))
    return [
        sorted(
            (
                {(int(plan.groups[k]), int(plan.indices[k])) for k in part}
                for plan in plans
                for part in getattr(plan, kind)[update]
                if part
            ),
            key=sorted,
        )
        for update in range(updates)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_merged_plans_have_the_same_updates(ranks: int) -> None:
    plans = plan_ranks(ranks, critic=BatchSizes(3, 4, None), shuffle_seed=1)
    merged = merge_plans(plans)
    assert len(merged) == 21
    for kind in ("policy", "critic"):
        assert list_work([merged], kind) == list_work(plans, kind)
    assert sorted(k for part in merged.forward for k in part) == list(range(21))
    assert merged.scores.tolist() == [score for plan in plans for score in plan.scores.tolist()]
    json.dumps(merged.policy)  # plain numbers


def test_baselines_that_some_rank_lacks_are_lacking() -> None:
    plans = plan_ranks(2)
    assert merge_plans(plans).baselines is None
    some = [replace(plan, baselines=np.zeros(len(plan))) for plan in plans]
    assert merge_plans(some).baselines.tolist() == [0.0] * 21
    assert merge_plans([plans[0], some[1]]).baselines is None
