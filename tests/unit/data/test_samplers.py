"""The order of prompts is a function of the position: every row once an epoch, and a resume needs one number."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.samplers import (
    BufferedShuffleSampler,
    CurriculumSampler,
    CustomSampler,
    PromptStream,
    Sampler,
    SequentialSampler,
    ShuffledSampler,
    WeightedSampler,
)
from verl.errors import DataError

pytestmark = pytest.mark.unit
law = settings(max_examples=30, deadline=None)


def backwards(epoch: int, seed: int, rows: int, column: Callable[[str], list[Any]]) -> list[int]:
    return list(range(rows))[::-1]


def blocks(length: int, rows: int) -> np.ndarray:
    return np.append(np.arange(rows, length, rows), length)


def sampled(sampler: Any, rows: int = 10, seed: int = 0, column: Any = None) -> CustomSampler:
    return CustomSampler(sampler, "my_sampler.py:order", rows, seed, column)


ORDERS: dict[str, Callable[[int, int], Sampler]] = {
    "in order": lambda length, seed: SequentialSampler(length),
    "shuffled": ShuffledSampler,
    "by buffer": lambda length, seed: BufferedShuffleSampler(blocks(length, 4), 7, seed),
    "by a buffer of one": lambda length, seed: BufferedShuffleSampler(blocks(length, 3), 1, seed),
    "by a buffer of all": lambda length, seed: BufferedShuffleSampler(blocks(length, 5), 1000, seed),
    "ranked": lambda length, seed: CurriculumSampler(np.arange(length) % 3.0, "level", seed),
    "ranked without a seed": lambda length, seed: CurriculumSampler(np.arange(length) % 3.0, "level", None),
    "sampled": lambda length, seed: sampled(backwards, length, seed),
}


@pytest.mark.parametrize("name", ORDERS)
@law
@given(length=st.integers(1, 40), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
def test_every_row_comes_exactly_once_an_epoch(name: str, length: int, seed: int, epoch: int) -> None:
    order = ORDERS[name](length, seed)
    assert order.length == length
    assert sorted(order.row(epoch * length + place) for place in range(length)) == list(range(length))


@pytest.mark.parametrize("name", [*ORDERS, "weighted"])
@law
@given(length=st.integers(1, 12), before=st.integers(0, 25), after=st.integers(0, 25))
def test_a_resumed_stream_goes_on_as_if_never_stopped(name: str, length: int, before: int, after: int) -> None:
    def stream() -> PromptStream:
        if name == "weighted":
            return PromptStream(WeightedSampler([ShuffledSampler(length, 1), SequentialSampler(3)], [0.5, 2], seed=1))
        return PromptStream(ORDERS[name](length, 1))

    uninterrupted = stream()
    whole = [next(uninterrupted) for _ in range(before + after)]
    first, second = stream(), stream()
    head = [next(first) for _ in range(before)]
    second.load(first.state())
    assert head + [next(second) for _ in range(after)] == whole
    assert [position for position, _ in whole] == list(range(before + after))


@pytest.mark.parametrize("name", ["shuffled", "by buffer", "ranked"])
def test_epochs_and_seeds_have_orders_of_their_own(name: str) -> None:
    def rows(seed: int, epoch: int) -> tuple[int, ...]:
        order = ORDERS[name](50, seed)
        return tuple(order.row(epoch * 50 + place) for place in range(50))

    assert len({rows(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
    assert rows(1, 2) == rows(1, 2)


def test_the_orders_are_the_same_on_every_machine() -> None:
    def head(order: Sampler) -> list[int]:
        return [order.row(place) for place in range(8)]

    assert head(ShuffledSampler(8, 42)) == [4, 3, 7, 6, 0, 1, 5, 2]
    assert head(BufferedShuffleSampler(blocks(100, 4), 8, 42)) == [1, 2, 0, 20, 23, 21, 3, 22]
    assert head(WeightedSampler([SequentialSampler(8), SequentialSampler(8)], [3, 1], 42)) == [0, 8, 1, 2, 3, 4, 5, 9]


@law
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 60), st.integers(0, 99))
def test_a_buffer_reads_each_block_for_few_windows_and_few_blocks_at_once(
    length: int, block: int, buffer: int, seed: int
) -> None:
    order = BufferedShuffleSampler(blocks(length, block), buffer, seed)
    read = [order.row(place) // block for place in range(length)]
    windows = [set(read[start : start + buffer]) for start in range(0, length, buffer)]
    small = 1 if length % block else 0  # one block may be smaller
    assert all(len(window) <= -(-buffer // block) + 1 + small for window in windows)
    assert sum(map(len, windows)) <= -(-length // block) + len(windows) - 1


def test_a_buffer_mixes_rows_from_all_over_the_files() -> None:
    order = BufferedShuffleSampler(blocks(100_000, 100), 1000, seed=3)
    first = [order.row(place) for place in range(200)]
    assert max(first) - min(first) > 50_000
    assert len({row // 100 for row in first}) > 8, "a batch is not a stretch of the file"


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([3, 1], [3, 1]), ([0.7, 0.2, 0.1], [7, 2, 1]), ([10, 20], [1, 2]), ([1, 1e-9], [10_000, 1]), ([5], [1])],
)
def test_weights_are_shares_of_the_draws(weights: list[float], counts: list[int]) -> None:
    lengths = [50, 7, 3][: len(weights)]
    order = WeightedSampler([ShuffledSampler(length, 1) for length in lengths], weights, seed=2)
    assert order.length == sum(lengths)
    firsts = np.cumsum([0, *lengths])
    draws = [order.row(position) for position in range(3 * sum(counts))]
    sources = np.searchsorted(firsts, draws, side="right") - 1
    for start in range(0, len(draws), sum(counts)):
        assert Counter(sources[start : start + sum(counts)].tolist()) == dict(enumerate(counts))
    for source, length in enumerate(lengths):
        own = [draw - firsts[source] for draw in np.array(draws)[sources == source]]
        for start in range(0, len(own) - length + 1, length):
            assert sorted(own[start : start + length]) == list(range(length)), "each once in its own epoch"


def test_a_curriculum_goes_from_easy_to_hard_each_epoch_and_shuffles_equals() -> None:
    levels = np.array([2.0, 1.0, 1.0, 3.0, 1.0, 2.0])
    order = CurriculumSampler(levels, "level", seed=4)
    epochs = [[order.row(6 * epoch + place) for place in range(6)] for epoch in range(5)]
    assert all(levels[rows].tolist() == [1, 1, 1, 2, 2, 3] for rows in epochs)
    assert len(set(map(tuple, epochs))) > 1
    still = CurriculumSampler(levels, "level", seed=None)
    assert [still.row(place) for place in range(6)] == [1, 2, 4, 0, 5, 3]


def test_a_sampler_may_omit_or_repeat_rows_and_read_columns() -> None:
    def hard_twice(epoch: int, seed: int, rows: int, column: Callable[[str], list[Any]]) -> np.ndarray:
        hard = np.flatnonzero(np.array(column("level")) > 1)
        return np.random.default_rng([seed, epoch]).permutation(np.repeat(hard, 2))

    order = sampled(hard_twice, rows=3, column={"level": [1, 2, 3]}.__getitem__)
    assert order.length == 4
    assert sorted(order.row(4 + place) for place in range(4)) == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (lambda *_: [0, 10], r"returned row 10 at index 1 of epoch 0; rows go from 0 to 9"),
        (lambda *_: [-1], r"returned row -1 at index 0"),
        (
            lambda *_: [0.5],
            r"returned float64 of shape \(1,\) for epoch 0; it must return a non-empty list of row numbers",
        ),
        (lambda *_: [[1]], r"of shape \(1, 1\)"),
        (lambda *_: [], r"of shape \(0,\)"),
        (lambda *_: None, r"returned object of shape \(\)"),
        (lambda *_: np.random.default_rng().permutation(10), r"two different orders.*default_rng\(\[seed, epoch\]\)"),
    ],
)
def test_errors_of_a_sampler_say_what_is_wrong(sampler: Any, said: str) -> None:
    with pytest.raises(DataError, match=rf"data\.sampler=my_sampler\.py:order .*{said}"):
        sampled(sampler)


def test_epochs_of_a_sampler_are_of_one_length() -> None:
    order = sampled(lambda epoch, *_: range(3 + epoch))
    with pytest.raises(DataError, match="returned 4 rows for epoch 1 and 3 for epoch 0"):
        order.row(3)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (ShuffledSampler(9, 7), r"length 9 \(now 10\)"),
        (ShuffledSampler(10, 8), r"seed 8 \(now 7\)"),
        (SequentialSampler(10), r"shuffle False \(now True\), seed None \(now 7\)"),
        (BufferedShuffleSampler(blocks(10, 2), 4, 7), r"shuffle_buffer_size 4 \(now None\)"),
        (BufferedShuffleSampler(blocks(10, 3), 4, 7), r"blocks \d+ \(now None\)"),
        (CurriculumSampler(np.zeros(10), "level", 7), r"curriculum_key level \(now None\)"),
        (
            WeightedSampler([ShuffledSampler(4, 7), ShuffledSampler(6, 8)], [1, 2], 7),
            r"lengths \[4, 6\] .*entries \d+ .*train_weights \[1, 2\]",
        ),
    ],
)
def test_a_position_in_another_order_is_refused(saved: Sampler, said: str) -> None:
    with pytest.raises(DataError, match=rf"{said}.*resume_mode=disable"):
        PromptStream(ShuffledSampler(10, 7)).load(PromptStream(saved).state())


def test_the_same_settings_over_other_blocks_or_numbers_are_another_order() -> None:
    def refused(saved: Sampler, now: Sampler, said: str) -> None:
        with pytest.raises(DataError, match=rf"{said} \d+ \(now \d+\)\. Use the same data files"):
            PromptStream(now).load(PromptStream(saved).state())

    refused(BufferedShuffleSampler(blocks(10, 2), 4, 7), BufferedShuffleSampler(blocks(10, 3), 4, 7), "blocks")
    refused(CurriculumSampler(np.zeros(10), "level", 7), CurriculumSampler(np.arange(10.0), "level", 7), "numbers")
    refused(
        WeightedSampler([SequentialSampler(3)], [1], seed=1),
        WeightedSampler([SequentialSampler(3)], [1], seed=2),
        "seed",
    )
    parts = [BufferedShuffleSampler(blocks(10, size), 4, 7) for size in (2, 3)]
    refused(
        WeightedSampler([SequentialSampler(3), parts[0]], [1, 1], 1),
        WeightedSampler([SequentialSampler(3), parts[1]], [1, 1], 1),
        "entries",
    )
