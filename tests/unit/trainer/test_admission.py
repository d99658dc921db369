"""Admission limits how many groups start."""

import pytest

from verl.trainer.buffer.admission import Admission

pytestmark = pytest.mark.unit


def start_all(admission: Admission, started: int) -> int:
    """Start groups, none of which any step has seen, until no more are allowed; return their number."""
    while admission.may_start(started):
        admission.record_started()
        started += 1
    return started


@pytest.mark.parametrize(("run_ahead", "started"), [(0, [4, 8, 12]), (1, [8, 12, 16]), (0.3, [5, 9, 13])])
def test_each_version_allows_one_more_batch(run_ahead: float, started: list[int]) -> None:
    admission, count = Admission(4, run_ahead=run_ahead), 0
    for version, expected in enumerate(started, start=7):  # counted from the first version, as after a resume
        admission.advance(version)
        count = start_all(admission, count)
        assert count == expected


def test_no_group_starts_that_no_step_of_the_run_would_train() -> None:
    admission = Admission(4, run_ahead=2, steps=2)
    admission.advance(5)
    assert start_all(admission, 0) == 8


def test_rejected_groups_are_replaced_up_to_the_bound_of_the_search() -> None:
    admission = Admission(2, max_batches=2)
    admission.advance(0)
    started = start_all(admission, 0)
    for _ in range(9):
        admission.record_unusable()
    assert start_all(admission, started) == 4, "2 batches of 2 may be searched"


def test_dropped_prompts_are_replaced_beyond_the_bound() -> None:
    admission = Admission(2, max_batches=1)
    admission.advance(0)
    counted = start_all(admission, 0)
    for _ in range(3):
        admission.record_unusable()
        counted = start_all(admission, counted - 1)  # a dropped one is not counted
        assert counted == 2
