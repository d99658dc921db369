"""Failures of a step are counted, and stop the run when they are too many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.rewards.result import Failed, FailureKind, FailureTracker, RewardResult, Scored, parse_result
from verl.types import SampleHandle

pytestmark = pytest.mark.unit

kinds: st.SearchStrategy[FailureKind] = st.sampled_from(["error", "timeout", "died", "invalid"])
outcomes = st.one_of(st.just(Scored(1.0)), st.builds(Failed, kinds, st.just("why")))


@given(st.lists(outcomes, min_size=1, max_size=40))
def test_error_and_timeout_rates_add_up_to_the_failures_of_the_step(step: list[RewardResult]) -> None:
    tracker = FailureTracker(max_failure_rate=1.0, samples=len(step))
    for outcome in step:
        tracker.add(outcome)
    rates = tracker.end_step()
    failed = [outcome for outcome in step if isinstance(outcome, Failed)]
    assert sum(rates.values()) == pytest.approx(len(failed) / len(step))
    assert rates["reward/timeout_rate"] == sum(outcome.kind == "timeout" for outcome in failed) / len(step)
    assert set(tracker.end_step().values()) == {0.0}


@given(st.integers(1, 50), st.floats(0, 1))
def test_the_run_stops_at_the_first_failure_above_the_limit(samples: int, limit: float) -> None:
    tracker, allowed = FailureTracker(limit, samples), int(limit * samples)
    for count in range(allowed):
        tracker.add(Failed("timeout", f"failure {count}"))
    if allowed < samples:
        with pytest.raises(RewardError, match=f"{allowed + 1} of the {samples} responses .* could not be scored"):
            tracker.add(Failed("died", f"failure {allowed}"))


def test_the_message_has_the_first_failure_the_kinds_and_the_limit() -> None:
    tracker = FailureTracker(0.25, samples=8)
    tracker.add(Failed("timeout", "my_reward.py: gave no score"))
    tracker.add(Failed("error", "my_reward.py: raised KeyError"))
    with pytest.raises(RewardError) as caught:
        tracker.add(Failed("timeout", "a third one"))
    for part in ("3 of the 8", "2 timeout, 1 error", "reward.max_failure_rate=0.25", "my_reward.py: gave no score"):
        assert part in str(caught.value)


def test_missing_metrics_are_dropped_and_entries_that_are_not_numbers_are_named() -> None:
    nan, inf = float("nan"), float("inf")
    found = parse_result({"score": 1, "length": True, "judge": None, "ratio": nan, "far": inf, "parsed": "x"})
    assert found == (1.0, {"length": 1.0}, {"far": "inf", "parsed": "'x'"})


def test_the_first_failure_of_a_step_is_reported_at_once() -> None:
    reported: list[str] = []
    tracker = FailureTracker(0.5, samples=8, report=reported.append)
    for count in range(3):
        tracker.add(Failed("error", f"failure {count}"))
    tracker.end_step()
    tracker.add(Failed("died", "failure 3"))
    assert [line.rsplit(maxsplit=2)[-2:] for line in reported] == [["failure", "0"], ["failure", "3"]]


def test_a_failed_episode_counts_once_however_many_branches_it_has() -> None:
    failed = SampleHandle(None, 0, 4, 2, 0.0, 0, failure=Failed("error", "why"), branches=3)
    scored = [SampleHandle(None, 0, 4, 2, 1.0, 0, index=index) for index in range(1, 4)]
    tracker = FailureTracker(max_failure_rate=0.25, samples=4)
    assert tracker.keep_scored([failed, failed, failed, *scored]) == scored
    assert tracker.end_step()["reward/error_rate"] == 0.25
