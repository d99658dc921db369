"""Which train ranks get the same samples. Imports no torch: the controller plans with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class RankLayout:
    """The data rank of every rank. Ranks with the same data rank compute one model together, on the same samples.

    A batch is split over data ranks. The results of all ranks of a data rank are the same.

    >>> layout = RankLayout((0, 1, 0, 1))  # tensor parallelism over ranks 0 and 2, and over 1 and 3
    >>> layout.spread(["first half", "second half"])
    ['first half', 'second half', 'first half', 'second half']
    >>> layout.collect(["a", "b", "a", "b"])
    ['a', 'b']
    """

    data_ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = Counter(self.data_ranks)
        if sorted(counts) != list(range(len(counts))) or len(set(counts.values())) > 1:
            raise ValueError(f"layout {self.data_ranks}: data ranks must be 0, 1, ..., each of as many ranks")

    @classmethod
    def of_adjacent(cls, world_size: int, group_size: int = 1) -> RankLayout:
        """Return the layout in which groups of adjacent ranks have the same samples.

        >>> RankLayout.of_adjacent(4, 2).data_ranks
        (0, 0, 1, 1)
        """
        return cls(tuple(rank // group_size for rank in range(world_size)))

    @property
    def world_size(self) -> int:
        return len(self.data_ranks)

    @property
    def data_size(self) -> int:
        """The number of parts into which a batch is split."""
        return len(self._firsts)

    @property
    def group_size(self) -> int:
        """The number of ranks that get the same samples."""
        return self.world_size // self.data_size

    def spread(self, parts: Sequence[T]) -> list[T]:
        """Return the part of each rank from the parts by data rank."""
        if len(parts) != self.data_size:
            raise ValueError(f"{len(parts)} parts of a batch for {self.data_size} data ranks")
        return [parts[data_rank] for data_rank in self.data_ranks]

    def collect(self, results: Sequence[T]) -> list[T]:
        """Return the result of each data rank from the results of all ranks."""
        return [results[rank] for rank in self._firsts]

    @cached_property
    def _firsts(self) -> list[int]:
        """The first rank of each data rank."""
        firsts: dict[int, int] = {}
        for rank, data_rank in enumerate(self.data_ranks):
            firsts.setdefault(data_rank, rank)
        return [firsts[data_rank] for data_rank in sorted(firsts)]
