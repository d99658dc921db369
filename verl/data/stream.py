"""The endless order of prompts, as a pure function of (seed, position).

Why not torchdata's StatefulDataLoader: rows are read where they are needed and tokenised in microseconds, so there
are no loader processes whose state would have to be saved; what remains to resume is one number. That every row comes
exactly once an epoch, and that a resumed stream goes on where it stopped, are laws with tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from verl.errors import DataError

__all__ = ["PromptStream"]


class PromptStream:
    """Positions 0, 1, 2, ... without end, and the row of a data set of `length` rows at each.

    Iterating gives (position, row) and moves on; `row` looks anywhere without moving. With `shuffle` each epoch is a
    fresh permutation, the same on every machine and under every version of numpy.

    >>> stream = PromptStream(3, shuffle=False, seed=0)
    >>> [next(stream) for _ in range(4)]
    [(0, 0), (1, 1), (2, 2), (3, 0)]
    """

    def __init__(self, length: int, *, shuffle: bool, seed: int) -> None:
        if length < 1:
            raise DataError(f"a stream of prompts needs at least one row, the data has {length}")
        self.length, self.shuffle, self.seed = length, shuffle, seed
        self.position = 0
        # Two epochs: around the border between them, positions of both are asked for in turn.
        self._order = lru_cache(maxsize=2)(self._permutation)

    @property
    def epoch(self) -> int:
        """How many times every row has been handed out."""
        return self.position // self.length

    def row(self, position: int) -> int:
        """The row at a position."""
        epoch, place = divmod(position, self.length)
        return int(self._order(epoch)[place]) if self.shuffle else place

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        position = self.position
        self.position += 1
        return position, self.row(position)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: the position, and what it would be meaningless without."""
        return {"position": self.position, "length": self.length, "shuffle": self.shuffle, "seed": self.seed}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved position. Another length, seed or shuffle would repeat some rows and skip others."""
        now = self.state()
        if odd := [key for key in ("length", "shuffle", "seed") if state[key] != now[key]]:
            was = ", ".join(f"{key} {state[key]} (now {now[key]})" for key in odd)
            raise DataError(
                f"the checkpoint was written with another order of prompts: {was}. Use the same data files, "
                "data.max_prompt_length, data.shuffle and data.seed, or begin anew with trainer.resume_mode=disable"
            )
        self.position = state["position"]

    def _permutation(self, epoch: int) -> npt.NDArray[np.int32]:
        # RandomState, not default_rng: numpy promises that its numbers never change.
        return np.random.RandomState([self.seed % 2**32, epoch]).permutation(self.length).astype(np.int32)
