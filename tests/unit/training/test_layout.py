"""The layout of ranks: which of them get the same samples."""

import doctest

import pytest

from verl.training import layout
from verl.training.layout import RankLayout

pytestmark = pytest.mark.unit

# 8 ranks in Megatron's order: tensor parallel size 2 changes fastest, then data, then pipeline stages.
MEGATRON = RankLayout((0, 0, 1, 1, 0, 0, 1, 1))


def test_adjacent_ranks_share_samples() -> None:
    layout = RankLayout.of_adjacent(6, 2)
    assert layout.data_ranks == (0, 0, 1, 1, 2, 2)
    assert (layout.world_size, layout.data_size, layout.group_size) == (6, 3, 2)


def test_parts_reach_the_ranks_of_their_data_rank_and_results_come_back_once() -> None:
    assert MEGATRON.spread(["a", "b"]) == ["a", "a", "b", "b", "a", "a", "b", "b"]
    assert MEGATRON.collect(["a", "a", "b", "b", "a", "a", "b", "b"]) == ["a", "b"]
    assert (MEGATRON.data_size, MEGATRON.group_size) == (2, 4)


@pytest.mark.parametrize("data_ranks", [(0, 2), (1, 1), (0, 0, 1), (-1, 0)])
def test_a_layout_in_which_data_ranks_are_missing_or_uneven_is_refused(data_ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="data ranks must be"):
        RankLayout(data_ranks)


def test_a_batch_in_the_wrong_number_of_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="3 parts of a batch for 2 data ranks"):
        MEGATRON.spread([1, 2, 3])


def test_the_docstring_example_is_correct() -> None:
    assert doctest.testmod(layout).failed == 0
