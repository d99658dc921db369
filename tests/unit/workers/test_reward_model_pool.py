"""Several reward models look like one; one that is lost fails what it had, and is asked no more."""

import asyncio
from collections.abc import Sequence

import pytest

from verl.errors import ConfigError, EngineError
from verl.rewards.model import Unscored
from verl.workers.rewards import RewardActor, RewardModelPool, RewardModelSettings

pytestmark = pytest.mark.unit


class Model:
    """Scores with its own number once it is let go; a lost one raises what Ray's calls raise."""

    def __init__(self, number: float) -> None:
        self.number, self.asked = number, 0
        self.go, self.is_lost, self.looked = asyncio.Event(), False, 0

    async def score(self, token_ids: Sequence[int]) -> float | Unscored:
        self.asked += 1
        await self.go.wait()
        if self.is_lost:
            raise EngineError("the process behind reward model 0: score has died")
        return self.number

    async def is_there(self) -> bool:
        self.looked += 1
        if self.is_lost:
            raise EngineError("waited 60 s for reward model 0: is_there and gave up")
        return True


async def test_each_conversation_goes_to_the_model_with_the_fewest_tokens_to_read() -> None:
    first, second = Model(1), Model(2)
    pool = RewardModelPool([first, second])
    waiting = [asyncio.ensure_future(pool.score([7] * length)) for length in (5, 1, 1, 1)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.go.set()
    second.go.set()
    assert await asyncio.gather(*waiting) == [1, 2, 2, 2]


async def test_one_that_died_fails_what_it_had_and_the_others_go_on() -> None:
    lost, other = Model(1), Model(2)
    lost.is_lost = True
    lost.go.set()
    other.go.set()
    pool = RewardModelPool([lost, other])
    failed = await pool.score([7])
    assert isinstance(failed, Unscored)
    assert failed.kind == "died"
    assert "has died" in failed.what
    assert [await pool.score([7]) for _ in range(3)] == [2, 2, 2]
    assert lost.asked == 1


async def test_when_all_are_lost_everything_fails_at_once_and_says_why() -> None:
    lost = Model(1)
    lost.is_lost = True
    lost.go.set()
    pool = RewardModelPool([lost])
    for _ in range(2):
        failed = await pool.score([7])
        assert isinstance(failed, Unscored)
        assert "has died" in failed.what
    assert lost.asked == 1


async def test_one_that_is_slow_is_waited_for_as_long_as_it_is_there() -> None:
    slow = Model(1)
    request = asyncio.ensure_future(RewardModelPool([slow], patience_s=0.001).score([7]))
    while slow.looked < 3:
        await asyncio.sleep(0.001)
    assert not request.done()
    slow.go.set()
    assert await request == 1


async def test_one_that_does_not_answer_any_more_is_lost() -> None:
    hung = Model(1)
    hung.is_lost = True
    failed = await RewardModelPool([hung], patience_s=0.001).score([7])
    assert isinstance(failed, Unscored)
    assert "gave up" in failed.what


async def test_an_actor_scores_in_batches_by_the_model_that_its_settings_name() -> None:
    actor = RewardActor(RewardModelSettings("fake", {"vocabulary": 8}, batch=2, deadline_s=60))
    await actor.start()
    assert await asyncio.gather(*(actor.score([number]) for number in range(5))) == [0, 1, 2, 3, 4]
    assert isinstance(await actor.score([8]), Unscored)
    await actor.close()


async def test_an_engine_that_runs_no_reward_model_is_refused_with_the_mend() -> None:
    with pytest.raises(ConfigError, match=r"reward\.reward_model\.rollout\.name: 'sglang'.*use hf or vllm"):
        await RewardActor(RewardModelSettings("sglang", {}, batch=2, deadline_s=60)).start()
