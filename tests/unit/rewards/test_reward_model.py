"""Batching of requests to a reward model: deadlines, failures of single sequences, a lost model."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.fake_reward_model import FakeRewardModel
from verl.rewards.models.batcher import Batcher
from verl.rewards.models.interface import ScoringFailure

pytestmark = pytest.mark.unit


class Recorder(FakeRewardModel):
    """Keeps the sizes of its batches; the first waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.go = asyncio.Event()

    async def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
        self.sizes.append(len(batch))
        await self.go.wait()
        return await super().score(batch)


async def test_requests_that_arrive_while_a_batch_runs_join_the_next_batch() -> None:
    model = Recorder()
    batcher = Batcher(model, size=3, timeout_s=60)
    first = asyncio.ensure_future(batcher.score([10]))
    while not model.sizes:
        await asyncio.sleep(0)
    rest = [asyncio.ensure_future(batcher.score([number])) for number in range(5)]
    await asyncio.sleep(0)
    model.go.set()
    assert await asyncio.gather(first, *rest) == [10, 0, 1, 2, 3, 4]
    assert model.sizes == [1, 3, 2]


async def test_the_timeout_starts_with_the_batch_and_a_late_score_is_a_failure() -> None:
    model = Recorder()  # is never let go
    batcher = Batcher(model, size=1, timeout_s=0.01)
    outcomes = await asyncio.gather(batcher.score([1]), batcher.score([2]))
    assert model.sizes == [1, 1], "the second batch has its turn, and its own deadline"
    for outcome in outcomes:
        assert isinstance(outcome, ScoringFailure)
        assert outcome.kind == "timeout"
        assert "reward.deadline_s" in outcome.fix


async def test_a_sequence_that_fails_does_not_fail_those_beside_it() -> None:
    class Picky(FakeRewardModel):
        async def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
            if any(13 in tokens for tokens in batch):
                raise RuntimeError("out of luck")
            return await super().score(batch)

    batcher = Batcher(Picky(), size=8, timeout_s=60)
    good, bad, other = await asyncio.gather(batcher.score([1]), batcher.score([13]), batcher.score([2]))
    assert (good, other) == (1.0, 2.0)
    assert isinstance(bad, ScoringFailure)
    assert (bad.kind, bad.message) == ("error", "raised RuntimeError: out of luck")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
async def test_a_score_that_is_not_a_finite_number_is_a_failure(number: float) -> None:
    class Broken(FakeRewardModel):
        async def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
            return [number] * len(batch)

    outcome = await Batcher(Broken(), size=8, timeout_s=60).score([1])
    assert isinstance(outcome, ScoringFailure)
    assert outcome.kind == "invalid"
    assert str(number) in outcome.message


async def test_a_model_that_returns_too_few_scores_fails_all_requests() -> None:
    class Forgetful(FakeRewardModel):
        async def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
            return []

    batcher = Batcher(Forgetful(), size=8, timeout_s=60)
    for outcome in await asyncio.gather(batcher.score([1]), batcher.score([2])):
        assert isinstance(outcome, ScoringFailure)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [([], "no token"), ([1] * 129, "129 tokens, more than the 128 that the model supports"), ([64], "token 64")],
)
async def test_a_sequence_that_the_model_cannot_read_fails_before_a_request(tokens: list[int], why: str) -> None:
    outcome = await Batcher(FakeRewardModel(), size=8, timeout_s=60).score(tokens)
    assert isinstance(outcome, ScoringFailure)
    assert why in outcome.message


async def test_a_cancelled_request_does_not_affect_others() -> None:
    model = Recorder()
    batcher = Batcher(model, size=8, timeout_s=60)
    gone, here = asyncio.ensure_future(batcher.score([1])), asyncio.ensure_future(batcher.score([2]))
    while not model.sizes:
        await asyncio.sleep(0)
    gone.cancel()
    model.go.set()
    assert await here == 2.0
