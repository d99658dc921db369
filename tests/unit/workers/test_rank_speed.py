"""Which rank computes slowly by itself."""

from __future__ import annotations

import pytest

from verl.workers.rank_speed import compare_ranks, time_matrix_product

pytestmark = pytest.mark.unit


def test_the_slowest_rank_is_compared_with_the_median() -> None:
    assert compare_ranks([1.0, 1.0, 3.0, 2.0]) == {"perf/slowest_rank": 2.0, "perf/slowest_rank_slowdown": 3.0}
    assert compare_ranks([1.0, 2.0]) == {"perf/slowest_rank": 1.0, "perf/slowest_rank_slowdown": 2.0}


def test_a_single_rank_is_not_slow() -> None:
    assert compare_ranks([1.0]) == compare_ranks([]) == {}


def test_the_product_takes_time() -> None:
    assert time_matrix_product("cpu") > 0.0
