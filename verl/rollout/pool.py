"""Several engines that look like one: each request goes to the engine with the least to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from random import randrange

from verl.errors import EngineError
from verl.rollout.engine import RolloutEngine
from verl.types import Completion, SamplingParams

__all__ = ["EnginePool"]


class EnginePool:
    """Routes by outstanding work: tokens of the prompt plus tokens that may still come.

    A request may wait as long as its engine makes progress; an engine that finishes nothing for `stall_s` is named.
    Ties begin at an engine of the pool's own choice, so that many pools do not all run to the first one.
    """

    def __init__(self, engines: Sequence[RolloutEngine], *, stall_s: float = 1800.0) -> None:
        if not engines:
            raise EngineError(
                "a pool needs at least one rollout engine; set actor_rollout_ref.rollout.num_engines >= 1"
            )
        first = randrange(len(engines))
        self._order = [(first + step) % len(engines) for step in range(len(engines))]
        self._engines = list(engines)
        self._load = [0] * len(engines)
        self._last_finish = [0.0] * len(engines)
        self._stall_s = stall_s

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        place = min(self._order, key=self._load.__getitem__)
        work = len(token_ids) + sampling.max_tokens
        self._load[place] += work
        try:
            return await self._watched(place, asyncio.ensure_future(self._engines[place].generate(token_ids, sampling)))
        finally:
            self._load[place] -= work

    async def generate_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        """Request i by engine i modulo their number, each engine's in one call: nothing depends on the clock."""
        count = len(self._engines)
        shares = await asyncio.gather(
            *(engine.generate_all(requests[place::count]) for place, engine in enumerate(self._engines))
        )
        return [shares[number % count][number // count] for number in range(len(requests))]

    async def _watched(self, place: int, request: asyncio.Future[Completion]) -> Completion:
        since = time.monotonic()
        try:
            while not request.done():
                idle = time.monotonic() - max(since, self._last_finish[place])
                if idle >= self._stall_s:
                    raise EngineError(
                        f"rollout engine {place} has finished no request for {idle:.0f} s, with {self._load[place]:,} "
                        "tokens still to do: it hangs, or one answer takes longer than that"
                    )
                await asyncio.wait([request], timeout=self._stall_s - idle)
        finally:
            request.cancel()  # of no effect on one that is done
        self._last_finish[place] = time.monotonic()
        return request.result()

    @property
    def load(self) -> tuple[int, ...]:
        """Outstanding tokens per engine."""
        return tuple(self._load)
