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
    assert [engine.requests for engine in engines] == [1, 6]


async def test_an_engine_that_does_not_answer_is_named() -> None:
    pool = EnginePool([FakeRolloutEngine(seconds_per_token=10)], deadline_s=0.01)
    with pytest.raises(EngineError, match=r"engine 0 did not answer .* 3 prompt tokens and up to 8"):
        await pool.generate([1, 2, 3], SamplingParams(max_tokens=8))


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(EngineError, match="num_engines"):
        EnginePool([])
