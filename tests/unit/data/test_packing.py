"""Laws of the cuts: every sample exactly once, budgets are hard, shares are even."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.packing import balance, chunk, pack, pack_into

pytestmark = pytest.mark.unit
law = settings(max_examples=60, deadline=None)

lengths_lists = st.lists(st.integers(0, 50), max_size=60)


def tokens(piece: list[int], lengths: list[int]) -> int:
    return sum(lengths[index] for index in piece)


def assert_every_index_once(pieces: list[list[int]], lengths: list[int]) -> None:
    assert sorted(index for piece in pieces for index in piece) == list(range(len(lengths)))
    for piece in pieces:
        assert [lengths[i] for i in piece] == sorted(lengths[i] for i in piece)


def assert_within(pieces: list[list[int]], lengths: list[int], budget: int) -> None:
    for piece in pieces:
        assert len(piece) == 1 or tokens(piece, lengths) <= budget


@law
@given(lengths_lists, st.integers(1, 80))
def test_packing_never_exceeds_the_budget_but_by_a_lone_longer_sample(lengths: list[int], budget: int) -> None:
    pieces = pack(lengths, budget)
    assert_every_index_once(pieces, lengths)
    assert_within(pieces, lengths, budget)
    assert all(pieces)
    alone = {index for index, length in enumerate(lengths) if length > budget}
    assert {piece[0] for piece in pieces if tokens(piece, lengths) > budget} == alone


@law
@given(lengths_lists, st.integers(1, 80))
def test_packing_leaves_no_two_pieces_that_would_fit_into_one(lengths: list[int], budget: int) -> None:
    sums = sorted(tokens(piece, lengths) for piece in pack(lengths, budget))
    assert len(sums) < 2 or sums[0] + sums[1] > budget


@law
@given(lengths_lists, st.integers(1, 80), st.integers(0, 5))
def test_pack_into_returns_the_requested_count_within_the_budget(lengths: list[int], budget: int, more: int) -> None:
    count = max(len(pack(lengths, budget)) + more, 1)
    pieces = pack_into(lengths, budget, count)
    assert len(pieces) == count
    assert_every_index_once(pieces, lengths)
    assert_within(pieces, lengths, budget)


@law
@given(lengths_lists, st.integers(1, 9))
def test_chunks_have_the_size_and_are_cut_along_the_lengths(lengths: list[int], size: int) -> None:
    pieces = chunk(lengths, size)
    assert_every_index_once(pieces, lengths)
    assert all(len(piece) == size for piece in pieces[:-1])
    flat = [lengths[index] for piece in pieces for index in piece]
    assert flat == sorted(lengths)


@law
@given(lengths_lists, st.integers(1, 12))
def test_shares_differ_by_no_more_than_the_longest_sample(lengths: list[int], parts: int) -> None:
    shares = balance(lengths, parts)
    assert len(shares) == parts
    assert_every_index_once(shares, lengths)
    loads = [tokens(share, lengths) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@law
@given(lengths_lists, st.integers(1, 12), st.integers(0, 3))
def test_shares_can_be_bounded_in_count(lengths: list[int], parts: int, more: int) -> None:
    most = -(-len(lengths) // parts) + more or 1
    shares = balance(lengths, parts, max_items=most)
    assert_every_index_once(shares, lengths)
    assert all(len(share) <= most for share in shares)


def test_more_shares_than_samples_leave_some_empty() -> None:
    assert balance([3, 5], 4) == [[1], [0], [], []]


def test_sixteen_thousand_samples_are_packed_tightly() -> None:
    lengths = np.random.default_rng(0).lognormal(8, 1, 16_384).clip(16, 32_768).astype(int).tolist()
    pieces = pack(lengths, 40_000)
    assert sum(lengths) / (len(pieces) * 40_000) > 0.99
