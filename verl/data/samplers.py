"""Samplers: which row of a data set comes at which position, as a pure function of the position.

A sampler is endless, epoch after epoch, and `row` accepts any position in any order. It has no state: one number is
enough to resume. Rows are numbered from 0. Checkpoints also hold the `identity` of the sampler, since a position means
nothing in another order. Adaptive samplers (`adaptive.py`) are the exception: they learn from scores and have a state.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from math import gcd, lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from verl.errors import DataError

MAX_ROUND = 10_000  # draws within which the sources have exactly their weights


class Sampler(ABC):
    """Maps positions 0, 1, 2, ... to rows; an epoch has `length` positions."""

    length = 0
    is_adaptive = False  # `row` depends on recorded scores; it is called once per position, in order

    def __init__(self, length: int, identity: dict[str, Any]) -> None:
        self.length, self._identity = length, identity

    @abstractmethod
    def row(self, position: int) -> int: ...

    def identity(self) -> dict[str, Any]:
        """Return what makes two samplers equal, by the names of the settings."""
        return {"length": self.length, **self._identity}

    def record(self, row: int, scores: Sequence[float]) -> None:  # noqa: B027 - a no-op for most samplers
        """Report the scores of a group, in the order of positions; only an adaptive sampler uses them."""

    def state(self) -> dict[str, Any]:
        """Return what `row` depends on besides the position, for a checkpoint."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:  # noqa: B027 - most samplers have no state
        """Restore what `state` returned."""


class _EpochSampler(Sampler):
    """The rows of each epoch as an array."""

    def __init__(self, length: int, identity: dict[str, Any], order: Callable[[int], npt.NDArray[Any]]) -> None:
        super().__init__(length, identity)
        # Two epochs: near their boundary, positions of both are requested in turn.
        self._order = lru_cache(maxsize=2)(order)

    def row(self, position: int) -> int:
        epoch, offset = divmod(position, self.length)
        return int(self._order(epoch)[offset])


class SequentialSampler(Sampler):
    """Rows in the order of the files.

    >>> [SequentialSampler(3).row(position) for position in range(4)]
    [0, 1, 2, 0]
    """

    def __init__(self, length: int) -> None:
        super().__init__(length, {"shuffle": False})

    def row(self, position: int) -> int:
        return position % self.length


class ShuffledSampler(_EpochSampler):
    """A new permutation every epoch, the same on every machine and with every version of numpy."""

    def __init__(self, length: int, seed: int) -> None:
        identity = {"shuffle": True, "seed": seed}
        super().__init__(length, identity, lambda epoch: make_random(seed, epoch).permutation(length).astype("i4"))


class BufferedShuffleSampler(Sampler):
    """For files larger than memory: blocks in random order, and rows shuffled within a window of some blocks.

    The blocks of an epoch, in a new random order, are split into windows of `buffer` rows, and each window is shuffled.
    Every row comes once per epoch, and consecutive rows come from few blocks, each of which is read for one or two
    windows.
    """

    def __init__(self, block_ends: npt.NDArray[np.int64], buffer: int, seed: int) -> None:
        identity = {"shuffle": True, "seed": seed, "shuffle_buffer_size": buffer, "blocks": _hash_array(block_ends)}
        super().__init__(int(block_ends[-1]), identity)
        self._buffer = buffer
        starts = np.concatenate([[0], block_ends[:-1]])
        sizes = block_ends - starts

        def blocks(epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
            """Return, for the blocks in the order of the epoch: their ends in that order, and their last rows + 1."""
            order = make_random(seed, epoch).permutation(len(sizes))
            return np.cumsum(sizes[order]), block_ends[order]

        def window(epoch: int, index: int) -> npt.NDArray[np.int32]:
            rows = min(buffer, self.length - index * buffer)
            return make_random(seed, epoch, index).permutation(rows).astype("i4")

        self._blocks = lru_cache(maxsize=2)(blocks)
        self._window = lru_cache(maxsize=4)(window)

    def row(self, position: int) -> int:
        epoch, offset = divmod(position, self.length)
        window, within = divmod(offset, self._buffer)
        offset = window * self._buffer + int(self._window(epoch, window)[within])
        ends, block_ends = self._blocks(epoch)
        block = int(np.searchsorted(ends, offset, side="right"))
        return int(block_ends[block] - (ends[block] - offset))


class CurriculumSampler(_EpochSampler):
    """A curriculum: every epoch from the lowest value to the highest; equal values are shuffled if there is a seed.

    >>> sampler = CurriculumSampler(np.array([3.0, 1.0, 2.0]), "level", seed=None)
    >>> [sampler.row(position) for position in range(4)]
    [1, 2, 0, 1]
    """

    def __init__(self, values: npt.NDArray[np.float64], key: str, seed: int | None) -> None:
        def rank(epoch: int) -> npt.NDArray[np.int32]:
            rows = np.arange(len(values)) if seed is None else make_random(seed, epoch).permutation(len(values))
            return rows[np.argsort(values[rows], kind="stable")].astype("i4")

        shuffle = {"shuffle": False} if seed is None else {"shuffle": True, "seed": seed}
        super().__init__(len(values), {"curriculum_key": key, "numbers": _hash_array(values), **shuffle}, rank)


SamplerFunction = Callable[[int, int, int, Callable[[str], list[Any]]], Sequence[int]]
"""(epoch, seed, row count, column name -> its value in each row) -> the rows of that epoch, in order."""


class CustomSampler(_EpochSampler):
    """The order given by the user's function: `sampler(epoch, seed, rows, column)` returns the rows of one epoch.

    Rows may be omitted or repeated, but all epochs must have the same length. The function must be pure, since it is
    called again after a resume; this is checked once.
    """

    def __init__(
        self,
        sampler: SamplerFunction,
        name: str,
        rows: int,
        seed: int,
        column: Callable[[str], list[Any]],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        sampler = partial(sampler, **kwargs) if kwargs else sampler
        self._sampler, self._name, self._rows, self._seed, self._column = sampler, name, rows, seed, column
        first = self._call(0)
        identity = {"sampler": name, "seed": seed, "rows": rows, **({"sampler_kwargs": kwargs} if kwargs else {})}
        super().__init__(len(first), identity, self._call)
        if not np.array_equal(self._order(0), first):
            raise self._error(
                "returned two different orders for epoch 0; a resumed run could not continue. Draw random numbers from "
                "numpy.random.default_rng([seed, epoch])"
            )

    def _call(self, epoch: int) -> npt.NDArray[np.int64]:
        order = np.asarray(self._sampler(epoch, self._seed, self._rows, self._column))
        if order.ndim != 1 or not len(order) or order.dtype.kind not in "iu":
            raise self._error(
                f"returned {order.dtype} of shape {order.shape} for epoch {epoch}; it must return a non-empty list of "
                "row numbers"
            )
        if len(invalid := np.flatnonzero((order < 0) | (order >= self._rows))):
            raise self._error(
                f"returned row {order[invalid[0]]} at index {invalid[0]} of epoch {epoch}; rows go from 0 to "
                f"{self._rows - 1}"
            )
        if self.length and len(order) != self.length:
            raise self._error(
                f"returned {len(order):,} rows for epoch {epoch} and {self.length:,} for epoch 0; all epochs must have "
                "the same length"
            )
        return order.astype(np.int64)

    def _error(self, problem: str) -> DataError:
        return DataError(f"data.sampler={self._name} {problem}")


class WeightedSampler(Sampler):
    """Several samplers by weight: of every `sum(weights)` draws, `weights[k]` come from sampler k, in random order.

    Weights are first scaled to the smallest integers. The rows of each sampler follow those of the one before it, and
    each goes through its own epochs; an epoch of the whole has as many draws as there are rows.

    >>> sampler = WeightedSampler([SequentialSampler(2), SequentialSampler(6)], [3, 1], seed=0)
    >>> [sampler.row(position) for position in range(8)]
    [0, 1, 2, 0, 1, 0, 1, 3]
    """

    def __init__(self, samplers: Sequence[Sampler], weights: Sequence[float], seed: int) -> None:
        lengths = [sampler.length for sampler in samplers]
        self._samplers, self._counts, self._starts = samplers, _to_integers(weights), np.cumsum([0, *lengths])
        self._round = sum(self._counts)
        identity = {
            "lengths": lengths,
            "entries": zlib.crc32(repr([sampler.identity() for sampler in samplers]).encode()),
            "train_weights": self._counts,
            "seed": seed,
        }
        super().__init__(sum(lengths), samplers[0].identity() | {"length": sum(lengths)} | identity)

        def draw(index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
            """Return, for each draw of a round: its sampler, and how many draws of that sampler came before."""
            which = make_random(seed, index).permutation(np.repeat(np.arange(len(lengths)), self._counts))
            before = np.empty_like(which)
            for sampler, count in enumerate(self._counts):
                before[which == sampler] = np.arange(count)
            return which, before

        self._draws = lru_cache(maxsize=4)(draw)

    def row(self, position: int) -> int:
        index, offset = divmod(position, self._round)
        which, before = self._draws(index)
        k = int(which[offset])
        return int(self._starts[k]) + self._samplers[k].row(index * self._counts[k] + int(before[offset]))


class PromptStream:
    """Yields (position, row) for positions 0, 1, 2, ... without end, and reports scores to the sampler. After a resume
    it skips the positions that the checkpoint names as `consumed`.

    A row is drawn once. Rows that were drawn but not recorded before a checkpoint are part of its state and come again
    after a resume, because an adaptive sampler might choose other rows by then.

    >>> stream = PromptStream(SequentialSampler(3))
    >>> [next(stream) for _ in range(4)]
    [(0, 0), (1, 1), (2, 2), (3, 0)]
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.position = 0
        self._drawn: deque[int] = deque()  # rows that are not recorded yet
        self._again: deque[int] = deque()  # rows that were drawn before the resume
        self._consumed: set[int] = set()  # positions that are done although earlier ones are not

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        while self.position in self._consumed:
            self._consumed.remove(self.position)
            self.position += 1
        position = self.position
        self.position += 1
        row = self._again.popleft() if self._again else self._sampler.row(position)
        if self._sampler.is_adaptive:
            self._drawn.append(row)
        return position, row

    @property
    def is_adaptive(self) -> bool:
        """Whether rows depend on recorded scores."""
        return self._sampler.is_adaptive

    def record(self, scores: Iterable[Sequence[float]]) -> None:
        """Report the scores of the oldest groups that are not recorded yet, in the order of positions."""
        for each in scores if self._sampler.is_adaptive else ():
            self._sampler.record(self._drawn.popleft(), each)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: the position and the identity of the sampler; also its state, if it has one.

        The position of an adaptive sampler is the first that is not recorded.
        """
        state: dict[str, Any] = {"position": self.position - len(self._drawn), **self._sampler.identity()}
        if self._sampler.is_adaptive:
            state |= {"drawn": [*self._drawn, *self._again], "state": self._sampler.state()}
        return state

    @property
    def consumed(self) -> list[int]:
        """The positions that were done before the resume, and that the stream has not reached yet."""
        return sorted(self._consumed)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a saved position; refuse one of another sampler, which would repeat rows and skip others."""
        now = self._sampler.identity()
        own = ("position", "drawn", "state", "consumed")
        keys = [*now, *(key for key in state if key not in now and key not in own)]
        if different := [key for key in keys if state.get(key) != now.get(key)]:
            changes = ", ".join(f"{key} {state.get(key)} (now {now.get(key)})" for key in different)
            raise DataError(
                f"the checkpoint was written with another order of prompts: {changes}. Use the same data files and "
                "data.* settings, or start over with trainer.resume_mode=disable"
            )
        self.position = state["position"]
        self._consumed = set(state.get("consumed", ()))
        if self._sampler.is_adaptive:
            self._sampler.load_state(state["state"])
            self._again = deque(state["drawn"])


def make_random(seed: int, *numbers: int) -> np.random.RandomState:
    """Return a generator whose numbers follow from the seed and these numbers, on every machine."""
    # RandomState, not default_rng: numpy guarantees that its numbers never change.
    return np.random.RandomState([seed % 2**32, *numbers])


def _hash_array(array: npt.NDArray[Any]) -> int:
    return zlib.crc32(array.tobytes())


def _to_integers(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the same ratio; rounded if their sum would exceed `MAX_ROUND`.

    >>> _to_integers([0.7, 0.2, 0.1])
    [7, 2, 1]
    """
    parts = [Fraction(weight).limit_denominator(10**6) for weight in weights]
    scale = lcm(*(part.denominator for part in parts))
    counts = [int(part * scale) for part in parts]
    if 0 in counts or sum(counts) // gcd(*counts) > MAX_ROUND:
        return [max(1, round(MAX_ROUND * weight / sum(weights))) for weight in weights]
    return [count // gcd(*counts) for count in counts]
