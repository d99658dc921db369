"""The endless stream of prompts: a sampler and a position.

torchdata's StatefulDataLoader is not used: rows are read where they are needed and tokenized in microseconds, so there
are no loader processes whose state would have to be saved, and one number is enough to resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl.data.samplers import Sampler
from verl.errors import DataError


class PromptStream:
    """Yields (position, row) for positions 0, 1, 2, ... without end.

    >>> stream = PromptStream(SequentialSampler(3))
    >>> [next(stream) for _ in range(4)]
    [(0, 0), (1, 1), (2, 2), (3, 0)]
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.position = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        position = self.position
        self.position += 1
        return position, self._sampler.row(position)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: the position and the identity of the sampler."""
        return {"position": self.position, **self._sampler.identity()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a saved position; refuse one of another sampler, which would repeat rows and skip others."""
        now = self._sampler.identity()
        keys = [*now, *(key for key in state if key not in now and key != "position")]
        if different := [key for key in keys if state.get(key) != now.get(key)]:
            changes = ", ".join(f"{key} {state.get(key)} (now {now.get(key)})" for key in different)
            raise DataError(
                f"the checkpoint was written with another order of prompts: {changes}. Use the same data files and "
                "data.* settings, or start over with trainer.resume_mode=disable"
            )
        self.position = state["position"]
