"""Bin packing of sequences: micro-batches under a token budget or of a size, and balanced shares for ranks.

Pure, deterministic functions of lengths. Within every piece sequences are ordered by length, shortest first, so that
equal lengths are adjacent (an attention kernel can process a run of them at once). Lists rather than numpy: the pieces
of one rank are few, and Python's own sort and heap are faster for them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return as few pieces as best-fit decreasing finds, none with more than `budget` tokens.

    A sample that is itself longer than the budget gets its own piece.

    >>> pack([4, 9, 3, 2, 1], budget=5)
    [[1], [4, 0], [3, 2]]
    """
    pieces: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, piece), ascending: the first with enough room fits best
    for index in reversed(_sort_by_length(lengths)):
        length = lengths[index]
        best = bisect_left(room, (length, 0))
        if best < len(room):
            left, piece = room.pop(best)
            pieces[piece].append(index)
        else:
            left, piece = budget, len(pieces)
            pieces.append([index])
        if left >= length:
            insort(room, (left - length, piece))
    return [piece[::-1] for piece in pieces]


def pack_into(lengths: Sequence[int], budget: int, count: int) -> list[list[int]]:
    """Return exactly `count` pieces under `budget`, heaviest first, of nearly equal sizes; some may be empty.

    `count` must be at least what `pack` needs. It brings ranks with different numbers of micro-batches to the largest
    of them: no rank runs an empty micro-batch while it has samples to fill it, and peak memory is lower.
    """
    pieces, weights = _deal(lengths, count)
    if any(weight > budget and len(piece) > 1 for piece, weight in zip(pieces, weights, strict=True)):
        pieces = pack(lengths, budget)  # the budget is too tight for equal sizes
        assert len(pieces) <= count, f"{len(pieces)} pieces needed, {count} requested"
        pieces += [[] for _ in range(count - len(pieces))]
        weights = [sum(map(lengths.__getitem__, piece)) for piece in pieces]
    return [pieces[k] for k in sorted(range(count), key=weights.__getitem__, reverse=True)]


def chunk(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return pieces of `size` samples (fewer in the last), in order of length.

    >>> chunk([4, 9, 3, 2, 1], size=2)
    [[4, 3], [2, 0], [1]]
    """
    order = _sort_by_length(lengths)
    return [order[start : start + size] for start in range(0, len(order), size)]


def balance(lengths: Sequence[int], parts: int, *, max_items: int | None = None) -> list[list[int]]:
    """Return `parts` shares of nearly equal token counts: the longest remaining sample goes to the lightest share.

    The heaviest share exceeds the lightest by at most the longest sample. Counts may differ and shares may be empty;
    `max_items` bounds the count of each, and gives up that guarantee.

    >>> balance([8, 7, 6, 5, 4], parts=2)
    [[4, 3, 0], [2, 1]]
    """
    return _deal(lengths, parts, max_items)[0]


def _deal(lengths: Sequence[int], parts: int, max_items: int | None = None) -> tuple[list[list[int]], list[int]]:
    """Return the shares of `balance`, and the tokens of each."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    most = max_items or len(lengths)
    # A heap of (tokens, samples, share), each encoded as one integer: comparing them dominates the time.
    # The sample count breaks ties, so that empty samples spread.
    token, sample = parts * (len(lengths) + 1), parts
    loads = list(range(parts))
    full = []
    for index in reversed(_sort_by_length(lengths)):
        load = loads[0]
        share = shares[load % parts]
        share.append(index)
        load += lengths[index] * token + sample
        if len(share) < most:
            heapq.heapreplace(loads, load)
        else:
            heapq.heappop(loads)
            full.append(load)
    weights = [0] * parts
    for load in (*loads, *full):
        weights[load % parts] = load // token
    return [share[::-1] for share in shares], weights


def _sort_by_length(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lengths.__getitem__)
