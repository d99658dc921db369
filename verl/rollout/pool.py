"""Several engines that look like one: each request goes to the engine with the least to do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from verl.errors import EngineError
from verl.rollout.engine import RolloutEngine
from verl.types import Completion, SamplingParams

__all__ = ["EnginePool"]


class EnginePool:
    """Routes by outstanding work: tokens of the prompt plus tokens that may still come.

    Every request has a deadline; an engine that misses it is named in the error.
    """

    def __init__(self, engines: Sequence[RolloutEngine], *, deadline_s: float = 1800.0) -> None:
        if not engines:
            raise EngineError(
                "a pool needs at least one rollout engine; set actor_rollout_ref.rollout.num_engines >= 1"
            )
        self._engines = list(engines)
        self._load = [0] * len(engines)
        self._deadline_s = deadline_s

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        place = min(range(len(self._engines)), key=self._load.__getitem__)
        work = len(token_ids) + sampling.max_tokens
        self._load[place] += work
        try:
            request = self._engines[place].generate(token_ids, sampling)
            return await asyncio.wait_for(request, self._deadline_s)
        except asyncio.TimeoutError as error:
            raise EngineError(
                f"rollout engine {place} did not answer a request of {len(token_ids)} prompt tokens and up to "
                f"{sampling.max_tokens} new ones within {self._deadline_s:.0f} s"
            ) from error
        finally:
            self._load[place] -= work

    @property
    def load(self) -> tuple[int, ...]:
        """Outstanding tokens per engine."""
        return tuple(self._load)
