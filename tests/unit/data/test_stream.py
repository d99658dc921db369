"""The order of prompts is a function of seed and position."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.stream import PromptStream
from verl.errors import DataError

pytestmark = pytest.mark.unit
law = settings(max_examples=60, deadline=None)


@law
@given(st.integers(1, 40), st.booleans(), st.integers(0, 2**40), st.integers(0, 5))
def test_every_row_comes_exactly_once_an_epoch(length: int, shuffle: bool, seed: int, epoch: int) -> None:
    stream = PromptStream(length, shuffle=shuffle, seed=seed)
    rows = [stream.row(epoch * length + place) for place in range(length)]
    assert sorted(rows) == list(range(length))


@law
@given(st.integers(1, 20), st.booleans(), st.integers(0, 50), st.integers(0, 50))
def test_a_resumed_stream_goes_on_as_if_never_stopped(length: int, shuffle: bool, before: int, after: int) -> None:
    stream = PromptStream(length, shuffle=shuffle, seed=1)
    whole = [next(stream) for _ in range(before + after)]
    first = PromptStream(length, shuffle=shuffle, seed=1)
    head = [next(first) for _ in range(before)]
    second = PromptStream(length, shuffle=shuffle, seed=1)
    second.load(first.state())
    assert head + [next(second) for _ in range(after)] == whole
    assert [position for position, _ in whole] == list(range(before + after))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        stream = PromptStream(50, shuffle=True, seed=seed)
        return [stream.row(epoch * 50 + place) for place in range(50)]

    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert order(1, 2) == order(1, 2)


def test_the_order_is_the_same_on_every_machine() -> None:
    stream = PromptStream(8, shuffle=True, seed=42)
    assert [stream.row(place) for place in range(8)] == [4, 3, 7, 6, 0, 1, 5, 2]


def test_without_shuffle_rows_come_in_order() -> None:
    stream = PromptStream(3, shuffle=False, seed=0)
    assert [row for _, row in (next(stream) for _ in range(5))] == [0, 1, 2, 0, 1]
    assert stream.epoch == 1


@pytest.mark.parametrize("other", [{"length": 9}, {"seed": 8}, {"shuffle": False}])
def test_a_position_in_another_order_is_refused(other: dict) -> None:
    saved = PromptStream(**{"length": 10, "shuffle": True, "seed": 7, **other}).state()
    [name] = other
    with pytest.raises(DataError, match=f"{name} {other[name]} \\(now .*resume_mode=disable"):
        PromptStream(10, shuffle=True, seed=7).load(saved)


def test_no_rows_are_refused() -> None:
    with pytest.raises(DataError, match="at least one row"):
        PromptStream(0, shuffle=True, seed=0)
