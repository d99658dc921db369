"""Which row comes at which position: orders of the rows of a data set, each a pure function of the position.

An order goes on without end, epoch after epoch, and `row` may be asked for any position in any sequence: there is no
state, so that what it takes to resume is one number. Rows are numbered from 0 within the order; what it is made of
(`identity`) goes into checkpoints, for a position means nothing in another order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from verl.errors import DataError

__all__ = [
    "BufferedShuffleSampler",
    "CurriculumSampler",
    "CustomSampler",
    "Sampler",
    "SamplerFunction",
    "SequentialSampler",
    "ShuffledSampler",
    "WeightedSampler",
]

MAX_ROUND = 10_000  # draws within which several sources have exactly their shares


class Sampler(Protocol):
    """Rows at positions 0, 1, 2, ...; an epoch is `length` of them."""

    length: int

    def row(self, position: int) -> int: ...

    def identity(self) -> dict[str, Any]:
        """What an order must have in common with another to be the same, under the names of the settings."""
        ...


class SequentialSampler:
    """As the rows lie in the files.

    >>> [InOrder(3).row(position) for position in range(4)]
    [0, 1, 2, 0]
    """

    def __init__(self, length: int) -> None:
        self.length = _some(length)

    def row(self, position: int) -> int:
        return position % self.length

    def identity(self) -> dict[str, Any]:
        return {"length": self.length, "shuffle": False}


class ShuffledSampler:
    """A fresh permutation each epoch, the same on every machine and under every version of numpy."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self._seed = _some(length), seed
        # Two epochs: around the border between them, positions of both are asked for in turn.
        self._permutation = lru_cache(maxsize=2)(lambda epoch: _random(seed, epoch).permutation(length).astype("i4"))

    def row(self, position: int) -> int:
        epoch, place = divmod(position, self.length)
        return int(self._permutation(epoch)[place])

    def identity(self) -> dict[str, Any]:
        return {"length": self.length, "shuffle": True, "seed": self._seed}


class BufferedShuffleSampler:
    """For files that do not fit into memory: whole blocks in random order, and rows shuffled among a few of them.

    The blocks of an epoch, one behind the other in a fresh random order, are cut into windows of `buffer` rows, and
    each window is shuffled. So every row comes once an epoch, and those that come soon after each other lie in about
    `buffer` / rows of a block + 1 blocks, each of which is read for one window, or for two.
    """

    def __init__(self, block_ends: npt.NDArray[np.int64], buffer: int, seed: int) -> None:
        self.length = _some(int(block_ends[-1]) if len(block_ends) else 0)
        self._buffer, self._seed, self._blocks_mark = buffer, seed, _mark(block_ends)
        starts = np.concatenate([[0], block_ends[:-1]])
        sizes = block_ends - starts

        def blocks(epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
            """Of the blocks in the order of the epoch: where each ends in that order, and its last row + 1."""
            order = _random(seed, epoch).permutation(len(sizes))
            return np.cumsum(sizes[order]), block_ends[order]

        def window(epoch: int, number: int) -> npt.NDArray[np.int32]:
            rows = min(buffer, self.length - number * buffer)
            return _random(seed, epoch, number).permutation(rows).astype("i4")

        self._blocks = lru_cache(maxsize=2)(blocks)
        self._window = lru_cache(maxsize=4)(window)

    def row(self, position: int) -> int:
        epoch, place = divmod(position, self.length)
        number, within = divmod(place, self._buffer)
        place = number * self._buffer + int(self._window(epoch, number)[within])
        ends, block_ends = self._blocks(epoch)
        block = int(np.searchsorted(ends, place, side="right"))
        return int(block_ends[block] - (ends[block] - place))

    def identity(self) -> dict[str, Any]:
        buffer = {"shuffle_buffer_size": self._buffer, "blocks": self._blocks_mark}
        return {"length": self.length, "shuffle": True, "seed": self._seed, **buffer}


class CurriculumSampler:
    """A curriculum: each epoch from the lowest number to the highest; equal ones shuffled if there is a seed.

    >>> order = Ranked(np.array([3.0, 1.0, 2.0]), "level", seed=None)
    >>> [order.row(position) for position in range(4)]
    [1, 2, 0, 1]
    """

    def __init__(self, numbers: npt.NDArray[np.float64], key: str, seed: int | None) -> None:
        self.length, self._key, self._seed, self._numbers_mark = _some(len(numbers)), key, seed, _mark(numbers)

        def ranked(epoch: int) -> npt.NDArray[np.int32]:
            first = np.arange(len(numbers)) if seed is None else _random(seed, epoch).permutation(len(numbers))
            return first[np.argsort(numbers[first], kind="stable")].astype("i4")

        self._ranked = lru_cache(maxsize=2)(ranked)

    def row(self, position: int) -> int:
        epoch, place = divmod(position, self.length)
        return int(self._ranked(epoch)[place])

    def identity(self) -> dict[str, Any]:
        shuffle = {"shuffle": False} if self._seed is None else {"shuffle": True, "seed": self._seed}
        return {"length": self.length, "curriculum_key": self._key, "numbers": self._numbers_mark, **shuffle}


SamplerFunction = Callable[[int, int, int, Callable[[str], list[Any]]], Sequence[int]]
"""(epoch, seed, number of rows, column name -> its value in each row) -> the rows of that epoch, in order."""


class CustomSampler:
    """What a function of the user's own says: `sampler(epoch, seed, rows, column)` gives the rows of one epoch.

    Rows may be left out or come several times, but all epochs must have as many draws as the first. The function must
    be pure: it is asked again after a resume. That it is, is tried once.
    """

    def __init__(
        self, sampler: SamplerFunction, name: str, rows: int, seed: int, column: Callable[[str], list[Any]]
    ) -> None:
        self._sampler, self._name, self._rows, self._seed, self._column = sampler, name, _some(rows), seed, column
        self._order = lru_cache(maxsize=2)(self._ask)
        self.length = 0
        self.length = len(self._order(0))
        if not np.array_equal(self._order(0), self._ask(0)):
            raise self._wrong(
                "gave two different orders for epoch 0 when it was asked twice; a resumed run could not go on where it "
                "stopped. Draw from numpy.random.default_rng([seed, epoch])"
            )

    def row(self, position: int) -> int:
        epoch, place = divmod(position, self.length)
        return int(self._order(epoch)[place])

    def identity(self) -> dict[str, Any]:
        return {"length": self.length, "sampler": self._name, "seed": self._seed, "rows": self._rows}

    def _ask(self, epoch: int) -> npt.NDArray[np.int64]:
        order = np.asarray(self._sampler(epoch, self._seed, self._rows, self._column))
        if order.ndim != 1 or not len(order) or order.dtype.kind not in "iu":
            raise self._wrong(
                f"gave {order.dtype} of shape {order.shape} for epoch {epoch}; it must give a list of row numbers, at "
                "least one"
            )
        if len(odd := np.flatnonzero((order < 0) | (order >= self._rows))):
            raise self._wrong(
                f"gave row {order[odd[0]]} at place {odd[0]} of epoch {epoch}; there are rows 0 to {self._rows - 1}"
            )
        if self.length and len(order) != self.length:
            raise self._wrong(
                f"gave {len(order):,} rows for epoch {epoch} and {self.length:,} for epoch 0; all epochs must be of "
                "one length"
            )
        return order.astype(np.int64)

    def _wrong(self, what: str) -> DataError:
        return DataError(f"data.sampler={self._name} {what}")


class WeightedSampler:
    """Several orders by shares: of each `sum(weights)` draws, `weights[k]` are of order k, in random sequence.

    Weights are brought to whole numbers first, as small as can be. Each order counts its rows from where the one before
    it ends, and goes through its own epochs at its own pace; an epoch of the whole is as many draws as there are rows.

    >>> order = Weighted([InOrder(2), InOrder(6)], [3, 1], seed=0)
    >>> [order.row(position) for position in range(8)]
    [0, 1, 2, 0, 1, 0, 1, 3]
    """

    def __init__(self, orders: Sequence[Sampler], weights: Sequence[float], seed: int) -> None:
        lengths = [order.length for order in orders]
        self.length = sum(lengths)
        self._orders, self._counts, self._firsts = list(orders), _whole(weights), np.cumsum([0, *lengths])
        self._round, self._seed = sum(self._counts), seed

        def drawn(number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
            """Of each draw of a round: which order it is of, and how many of that order came before it."""
            which = _random(seed, number).permutation(np.repeat(np.arange(len(lengths)), self._counts))
            before = np.empty_like(which)
            for order, count in enumerate(self._counts):
                before[which == order] = np.arange(count)
            return which, before

        self._drawn = lru_cache(maxsize=4)(drawn)

    def row(self, position: int) -> int:
        number, place = divmod(position, self._round)
        which, before = self._drawn(number)
        order = int(which[place])
        return int(self._firsts[order]) + self._orders[order].row(number * self._counts[order] + int(before[place]))

    def identity(self) -> dict[str, Any]:
        return {
            **self._orders[0].identity(),
            "length": self.length,
            "lengths": [order.length for order in self._orders],
            "entries": zlib.crc32(repr([order.identity() for order in self._orders]).encode()),
            "train_weights": self._counts,
            "seed": self._seed,
        }


def _some(rows: int) -> int:
    if rows < 1:
        raise DataError(f"a stream of prompts needs at least one row, the data has {rows}")
    return rows


def _random(seed: int, *numbers: int) -> np.random.RandomState:
    # RandomState, not default_rng: numpy promises that its numbers never change.
    return np.random.RandomState([seed % 2**32, *numbers])


def _mark(array: npt.NDArray[Any]) -> int:
    """A number that another array hardly shares."""
    return zlib.crc32(array.tobytes())


def _whole(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the same relation, as small as can be, at most `MAX_ROUND` together (then rounded).

    >>> _whole([0.7, 0.2, 0.1])
    [7, 2, 1]
    """
    parts = [Fraction(weight).limit_denominator(10**6) for weight in weights]
    scale = lcm(*(part.denominator for part in parts))
    counts = [int(part * scale) for part in parts]
    if 0 in counts or sum(counts) // gcd(*counts) > MAX_ROUND:
        return [max(1, round(MAX_ROUND * weight / sum(weights))) for weight in weights]
    return [count // gcd(*counts) for count in counts]
