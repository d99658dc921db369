"""Episodes that ask the engines together, so that what an engine computes does not depend on who was faster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from verl.agents.episode import Generate
from verl.types import Completion, SamplingParams

__all__ = ["DeterministicBatcher", "GenerateAll"]

Request = tuple[Sequence[int], SamplingParams]
GenerateAll = Callable[[Sequence[Request]], Awaitable[list[Completion]]]
"""Many requests at once -> their answers, in the same order."""


class DeterministicBatcher:
    """`count` episodes, each with a seat of its own. What they ask waits until all who still sit there have asked; then
    all of it goes out in the order of the seats, and all get their answers. An episode that ends leaves its seat.

    The log-probs of an engine depend in their last bits on what else is in its batch. Here that is decided by the seats
    and by what the model wrote before, never by the clock: a round that is repeated gives the same bits.
    """

    def __init__(self, generate_all: GenerateAll, count: int) -> None:
        self._generate_all, self._count = generate_all, count
        self._taken = 0
        self._asking: dict[int, tuple[Request, asyncio.Future[Completion]]] = {}
        self._round: asyncio.Task[None] | None = None

    @contextmanager
    def slot(self) -> Iterator[Generate]:
        """The next free seat, until the episode ends."""
        number, self._taken = self._taken, self._taken + 1

        async def generate(token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
            answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            self._asking[number] = (token_ids, sampling), answer
            self._ask_if_all_do()
            return await answer

        try:
            yield generate
        finally:
            self._asking.pop(number, None)
            self._count -= 1
            self._ask_if_all_do()

    def _ask_if_all_do(self) -> None:
        if self._asking and len(self._asking) == self._count:
            asked = [self._asking[number] for number in sorted(self._asking)]
            self._asking.clear()
            self._round = asyncio.ensure_future(self._ask(asked))  # kept: the loop itself holds tasks weakly

    async def _ask(self, asked: Sequence[tuple[Request, asyncio.Future[Completion]]]) -> None:
        waiting = [answer for _, answer in asked]
        try:
            for answer, completion in zip(
                waiting, await self._generate_all([request for request, _ in asked]), strict=True
            ):
                if not answer.done():
                    answer.set_result(completion)
        except Exception as error:  # noqa: BLE001 - it is theirs
            for answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
