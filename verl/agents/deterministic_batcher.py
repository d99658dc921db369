"""Batches requests of concurrent episodes so that what an engine computes does not depend on timing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from verl.types import Completion, SamplingParams

T = TypeVar("T")

Request = tuple[Sequence[int], SamplingParams]
Generate = Callable[[Sequence[int], SamplingParams], Awaitable[Completion]]
GenerateAll = Callable[[Sequence[Request]], Awaitable[list[Completion]]]
"""Many requests -> their completions, in the same order."""


class DeterministicBatcher:
    """Holds back the requests of `count` episodes until every running episode has made one, then sends them as a batch
    in the order of their slots. An episode that ends frees its slot.

    The last bits of log-probs depend on the batch. Here the batch depends only on the slots and on the tokens that were
    generated so far, never on timing: repeating a round gives the same bits.
    """

    def __init__(self, generate_all: GenerateAll, count: int) -> None:
        self._generate_all, self._count = generate_all, count
        self._used = 0
        self._waiting: dict[int, tuple[Request, asyncio.Future[Completion]]] = {}  # by slot
        self._batch: asyncio.Task[None] | None = None

    @contextmanager
    def slot(self) -> Iterator[Generate]:
        """Take the next slot until the episode ends."""
        index, self._used = self._used, self._used + 1
        turns = asyncio.Lock()  # an episode may make several requests at once; its slot takes them one by one

        async def generate(token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
            async with turns:
                result: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
                self._waiting[index] = (token_ids, sampling), result
                self._send_if_complete()
                return await result

        try:
            yield generate
        finally:
            self._waiting.pop(index, None)
            self._count -= 1
            self._send_if_complete()

    def _send_if_complete(self) -> None:
        if self._waiting and len(self._waiting) == self._count:
            batch = [self._waiting[index] for index in sorted(self._waiting)]
            self._waiting.clear()
            completions = self._generate_all([request for request, _ in batch])
            resolve = resolve_futures([future for _, future in batch], completions)
            self._batch = asyncio.ensure_future(resolve)  # the loop keeps only weak references


async def resolve_futures(futures: Sequence[asyncio.Future[T]], results: Awaitable[Sequence[T]]) -> None:
    """Await results and set them, or the exception that they raise, on the futures that are not done (cancelled)."""
    try:
        for future, result in zip(futures, await results, strict=True):
            if not future.done():
                future.set_result(result)
    except Exception as error:  # noqa: BLE001 - raised where the futures are awaited
        for future in futures:
            if not future.done():
                future.set_exception(error)
