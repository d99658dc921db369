"""The endless sequence of prompts: a place in an order.

Why not torchdata's StatefulDataLoader: rows are read where they are needed and tokenised in microseconds, so there
are no loader processes whose state would have to be saved; what remains to resume is one number. That every row comes
exactly once an epoch, and that a resumed stream goes on where it stopped, are laws with tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl.data.samplers import Sampler
from verl.errors import DataError

__all__ = ["PromptStream"]


class PromptStream:
    """Positions 0, 1, 2, ... without end, and the row of the data at each: (position, row).

    >>> stream = PromptStream(InOrder(3))
    >>> [next(stream) for _ in range(4)]
    [(0, 0), (1, 1), (2, 2), (3, 0)]
    """

    def __init__(self, order: Sampler) -> None:
        self._order = order
        self.position = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        position = self.position
        self.position += 1
        return position, self._order.row(position)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: the position, and what it would be meaningless without."""
        return {"position": self.position, **self._order.identity()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved position. In another order that would repeat some rows and skip others."""
        now = self._order.identity()
        keys = [*now, *(key for key in state if key not in now and key != "position")]
        if odd := [key for key in keys if state.get(key) != now.get(key)]:
            was = ", ".join(f"{key} {state.get(key)} (now {now.get(key)})" for key in odd)
            raise DataError(
                f"the checkpoint was written with another order of prompts: {was}. Use the same data files and the "
                "same settings of data.*, or begin anew with trainer.resume_mode=disable"
            )
        self.position = state["position"]
