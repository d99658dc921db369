"""The pool sends a request to the engine with the least to do, and names one that does not answer."""

import asyncio
from collections.abc import Sequence

import pytest

from verl.errors import EngineError
from verl.rollout.fake import FakeRolloutEngine
from verl.rollout.pool import EnginePool
from verl.types import Completion, SamplingParams

pytestmark = pytest.mark.unit


class Counting(FakeRolloutEngine):
    def __init__(self, seconds_per_token: float) -> None:
        super().__init__(seconds_per_token=seconds_per_token)
        self.requests = 0

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        self.requests += 1
        return await super().generate(token_ids, sampling)


async def test_equal_requests_are_spread_evenly() -> None:
    engines = [Counting(0.001), Counting(0.001)]
    pool = EnginePool(engines)
    await asyncio.gather(*(pool.generate([1, 2], SamplingParams(max_tokens=4)) for _ in range(10)))
    assert [engine.requests for engine in engines] == [5, 5]
    assert pool.load == (0, 0)


async def test_a_long_request_keeps_others_away_from_its_engine() -> None:
    engines = [Counting(0.0005), Counting(0.0005)]
    pool = EnginePool(engines)
    sizes = [40, *[4] * 6]
    await asyncio.gather(*(pool.generate([1], SamplingParams(max_tokens=size)) for size in sizes))
    assert sorted(engine.requests for engine in engines) == [1, 6]


async def test_an_engine_that_finishes_nothing_is_named() -> None:
    pool = EnginePool([FakeRolloutEngine(seconds_per_token=10)], stall_s=0.01)
    with pytest.raises(EngineError, match=r"engine 0 has finished no request .* 11 tokens"):
        await pool.generate([1, 2, 3], SamplingParams(max_tokens=8))


async def test_a_request_that_waits_behind_others_is_not_taken_for_a_hang() -> None:
    class OneAtATime(FakeRolloutEngine):
        turn = asyncio.Lock()

        async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
            async with self.turn:
                return await super().generate(token_ids, sampling)

    pool = EnginePool([OneAtATime(seconds_per_token=0.1)], stall_s=1.0)
    requests = (pool.generate([1], SamplingParams(max_tokens=2)) for _ in range(8))  # the last waits 1.6 s
    assert len(await asyncio.gather(*requests)) == 8


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(EngineError, match="num_engines"):
        EnginePool([])
