"""Rules that look at several steps: each warns just beyond its limits, and not before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.diagnosis.diagnosis import Diagnosis, diagnose
from verl.diagnosis.history import History

pytestmark = pytest.mark.unit


def find(run: Iterable[dict[str, float]]) -> list[tuple[int, str]]:
    """Return (step, rule) of the advice about the metrics of a run."""
    return [(step, advice.rule) for step, advice in diagnose(enumerate(run, 1))]


def series(name: str, values: Sequence[float], **others: float) -> list[dict[str, float]]:
    """Return the metrics of steps; keywords are metrics with the same value in all steps, `__` for a slash."""
    return [{name: value} | {key.replace("__", "/"): other for key, other in others.items()} for value in values]


def collapse(last: float, rise: float = 0.0) -> list[dict[str, float]]:
    return [
        {"actor/entropy": 1.0 if step <= 10 else last, "reward/mean": 0.2 if step <= 10 else 0.2 + rise}
        | {"reward/std": 0.4, "reward/min": 0.0, "reward/max": 1.0}
        for step in range(1, 21)
    ]


def test_an_entropy_that_falls_without_reward_has_collapsed() -> None:
    assert find(collapse(0.1)) == [(20, "entropy-collapse")]
    assert find(collapse(0.11)) == []
    assert find(collapse(0.1, rise=0.19)) == [(20, "entropy-collapse")]
    assert find(collapse(0.1, rise=0.21)) == []
    assert find(collapse(0.1)[:19]) == []


def test_a_gradient_that_grows_in_every_quarter_drifts() -> None:
    warm_up, quarters = [99.0] * 5, (1.0, 2.0, 4.0, 5.1)
    growing = [value for value in quarters for _ in range(10)]
    assert find(series("actor/grad_norm", [*warm_up, *growing])) == [(45, "gradient-drift")]
    assert find(series("train/grad_norm", [*warm_up, *growing])) == [(45, "gradient-drift")]
    assert find(series("actor/grad_norm", [*warm_up, *growing[:-1]])) == []
    for other in ((1.0, 2.0, 4.0, 5.0), (1.0, 4.0, 2.0, 9.0), (1.0, 1.0, 1.0, 9.0)):
        assert find(series("actor/grad_norm", [*warm_up, *(value for value in other for _ in range(10))])) == []


@given(st.lists(st.floats(0.1, 0.5), min_size=45, max_size=120), st.integers(0, 44))
def test_no_single_peak_and_no_noise_is_a_drift(norms: list[float], peak: int) -> None:
    norms[peak] = 1e6
    assert find(series("actor/grad_norm", norms)) == []


def lengthen(last: float, rise: float = 0.0, first: float = 40.0) -> list[dict[str, float]]:
    return [
        {"response_length/mean": first if step <= 10 else last, "reward/mean": 0.2 if step <= 10 else 0.2 + rise}
        | {"reward/std": 0.4, "reward/min": 0.0, "reward/max": 1.0}
        for step in range(1, 21)
    ]


def test_responses_that_double_without_reward_explode() -> None:
    assert find(lengthen(80.0)) == [(20, "length-explosion")]
    assert find(lengthen(79.0)) == []
    assert find(lengthen(80.0, rise=0.039)) == [(20, "length-explosion")]
    assert find(lengthen(80.0, rise=0.041)) == []
    assert find(lengthen(34.0, first=3.0)) == []  # few tokens more
    assert find(lengthen(80.0)[:19]) == []


@pytest.mark.parametrize(("name", "limit"), [("response/repetitive_ratio", 0.2), ("response/empty_ratio", 0.1)])
def test_repetitive_or_empty_responses_in_three_steps_are_degenerate(name: str, limit: float) -> None:
    assert find(series(name, [limit + 0.01] * 3)) == [(3, "degenerate-responses")]
    assert find(series(name, [limit - 0.001] * 9)) == []
    assert find(series(name, [0.0, 3 * limit - 0.01, 0.0])) == []


def test_scoring_errors_and_timeouts_add_up() -> None:
    assert find(series("reward/error_rate", [0.021] * 3, reward__timeout_rate=0.0)) == [(3, "scoring-errors")]
    assert find(series("reward/error_rate", [0.0] * 3, reward__timeout_rate=0.021)) == [(3, "scoring-errors")]
    assert find(series("reward/error_rate", [0.01] * 9, reward__timeout_rate=0.009)) == []
    assert find(series("reward/error_rate", [0.0, 0.0, 0.05], reward__timeout_rate=0.0)) == []


def test_an_engine_that_preempts_one_of_ten_responses_lacks_memory() -> None:
    assert find(series("perf/preemptions_per_response", [0.11] * 3)) == [(3, "kv-preemption")]
    assert find(series("perf/preemptions_per_response", [0.099] * 9)) == []


def slow(ranks: Sequence[float], slowdown: float) -> list[dict[str, float]]:
    return [{"perf/slowest_rank": rank, "perf/slowest_rank_slowdown": slowdown} for rank in ranks]


def test_a_rank_that_is_always_the_slowest_is_reported() -> None:
    assert find(slow([3] * 8 + [1, 2], 1.6)) == [(10, "slow-rank")]
    assert find(slow([3] * 7 + [1, 2, 0], 1.6)) == []
    assert find(slow([3] * 10, 1.5)) == []
    assert find(slow([3] * 9, 9.0)) == []


@pytest.mark.parametrize("process", ["controller", "train_worker"])
def test_memory_that_grows_steadily_is_reported(process: str) -> None:
    name, warm_up = f"perf/{process}_rss_gib", [0.5] * 20
    growing = [2.0 + 0.02 * step for step in range(60)]  # by 1 GiB between the first and the last part
    assert find(series(name, [*warm_up, *growing])) == [(80, "memory-growth")]
    assert find(series(name, [*warm_up, *growing[:-1]])) == []
    assert find(series(name, [*warm_up, *(8.0 + value for value in growing)])) == []  # by less than 20%
    assert find(series(name, [*warm_up, *(0.5 + 0.0099 * step for step in range(60))])) == []  # by less than 0.5 GiB
    filling = [4.0 - 2.0 * 0.9**step for step in range(60)]  # a cache
    assert find(series(name, [*warm_up, *filling])) == []


def waiting(training: float, generation: float) -> list[tuple[int, str]]:
    return find([{"perf/trainer_idle": training, "perf/generation_idle": generation}])


def test_the_pool_that_waits_more_is_reported() -> None:
    assert waiting(0.31, 0.0) == waiting(0.5, 0.4) == [(1, "idle-trainer")]
    assert waiting(0.0, 0.31) == waiting(0.4, 0.5) == waiting(0.4, 0.4) == [(1, "idle-generation")]
    assert waiting(0.3, 0.3) == waiting(0.0, 0.0) == []


def test_the_validation_that_fell_most_is_named() -> None:
    rewards = [{"reward/mean": 0.1 * step, "val/a/mean@1": 0.5, "val/b/mean@1": 0.5} for step in range(1, 4)]
    last = {"reward/mean": 0.9, "val/a/mean@1": 0.44, "val/b/mean@1": 0.3}
    diagnosis = Diagnosis()
    assert [advice for step, each in enumerate([*rewards, last], 1) for advice in diagnosis.advise(each, step)] == []
    [advice] = diagnosis.advise(last, 5)
    assert advice.rule == "reward-hacking"
    assert "while val/b/mean@1 fell from 0.5 to 0.3" in advice.text
    assert "since step 3 the reward rose" in advice.text


def test_a_validation_before_the_first_step_is_no_reason_for_a_warning() -> None:
    diagnosis = Diagnosis()
    assert diagnosis.advise({"val/a/mean@1": 0.9}, 0) == []
    assert diagnosis.advise({"reward/mean": 0.5}, 1) == diagnosis.advise({"val/a/mean@1": 0.1}, 1) == []
    assert diagnosis.advise({"reward/mean": 0.9}, 2) == diagnosis.advise({"val/a/mean@1": 0.1}, 2) == []


def test_a_history_keeps_what_rules_look_at() -> None:
    run = History({"a"})
    for step in range(1, 5):
        run.record({"a": float("nan") if step == 2 else float(step), "b": 1.0}, step)
    assert run.values("a") == [1.0, 3.0, 4.0]
    assert run.values("a", last=2) == [3.0, 4.0]
    assert run.get_series("a").steps == [1, 3, 4]
    assert (run.values("b"), run.get("b"), run.get("c", 7.0)) == ([], 1.0, 7.0)
