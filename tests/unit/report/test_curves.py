"""Which curves come first, and at which steps."""

from __future__ import annotations

import math

import pytest

from verl.report.curves import MAX_STEPS, group_metrics, list_notable, make_columns, thin_out, to_json
from verl.tracking.run_folder import StepMetrics

pytestmark = pytest.mark.unit


def test_a_metric_is_in_the_first_group_that_names_it() -> None:
    names = ["val/sums/best@4", "val/sums/mean@4", "reward/mean", "actor/entropy", "my/own", "timing_s/gen"]
    assert list(group_metrics(names)) == [
        ("Reward", ["reward/mean"]),
        ("Validation", ["val/sums/mean@4", "val/sums/best@4"]),
        ("Policy update", ["actor/entropy"]),
        ("Time", ["timing_s/gen"]),
    ]


def test_metrics_that_are_always_0_come_last_unless_they_measure_success() -> None:
    steps = [
        StepMetrics(1, 0.0, {"reward/mean": 0.0, "val/a/mean@1": 0.0, "reward/error_rate": 0.0, "actor/kl": 0.0}),
        StepMetrics(2, 0.0, {"reward/mean": 0.0, "actor/kl": 0.5, "actor/grad_norm": math.nan}),
    ]
    assert list_notable(steps) == ["reward/mean", "val/a/mean@1", "actor/kl", "actor/grad_norm"]


def test_long_runs_are_thinned_out_but_keep_validations_and_the_last_step() -> None:
    steps = [
        StepMetrics(step, 0.0, {"val/a/mean@1": 1.0} if step % 1001 == 0 else {})
        for step in range(1, 2 * MAX_STEPS + 1)
    ]
    shown, stride = thin_out(steps)
    assert stride == 2
    kept = {each.step for each in shown}
    assert {1, 1001, 2002, 3003, 2 * MAX_STEPS} <= kept
    assert len(kept) < MAX_STEPS + 10
    assert thin_out(steps[:10]) == (steps[:10], 1)


def test_columns_have_null_where_a_step_has_no_value() -> None:
    columns = make_columns([StepMetrics(1, 1.0, {"a": 1.0}), StepMetrics(2, 2.0, {"b": math.nan})])
    assert columns["values"] == {"a": [1.0, None], "b": [None, "NaN"]}


@pytest.mark.parametrize(
    ("value", "text"), [(1 / 3, 0.333333), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (None, None), (1e-9, 1e-9)]
)
def test_numbers_are_short_and_always_json(value: float | None, text: object) -> None:
    assert to_json(value) == text
