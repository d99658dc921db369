"""Merging of metrics and timing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.tracking.metrics import Metrics, timer

pytestmark = pytest.mark.unit

names = st.sampled_from([f"a/{letter}" for letter in "abcdefgh"])
parts = st.dictionaries(names, st.floats(allow_nan=False))


def test_merge_adds_times_and_keeps_the_rest() -> None:
    merged = Metrics.merge({"reward/mean": 0.5}, {"timing_s/gen": 1.0}, {"timing_s/gen": 0.5, "x": 2})
    assert merged == {"reward/mean": 0.5, "timing_s/gen": 1.5, "x": 2.0}
    assert isinstance(merged["x"], float)


def test_a_name_given_twice_raises_and_is_named() -> None:
    with pytest.raises(ValueError, match="'reward/mean': reported twice"):
        Metrics.merge({"reward/mean": 0.5}, {"reward/mean": 0.5})


@given(parts)
def test_merging_nothing_changes_nothing_and_the_parts_stay_as_they_were(part: dict[str, float]) -> None:
    before = dict(part)
    merged = Metrics.merge({}, part, {})
    merged["new"] = 1.0
    assert part == before
    assert {name: merged[name] for name in before} == before


def test_a_timer_adds_up_and_counts_what_raised() -> None:
    metrics = Metrics()
    with timer(metrics, "gen"):
        pass
    first = metrics["timing_s/gen"]
    assert 0 <= first < 1
    with pytest.raises(RuntimeError), timer(metrics, "gen"):
        raise RuntimeError
    assert metrics["timing_s/gen"] > first
