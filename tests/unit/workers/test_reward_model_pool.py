"""Several reward models behind one interface: a lost one is restarted, and its conversations are scored again."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from observed_pool import list_loads
from simulated_clock import simulate

from tests.fake_reward_model import FACTORY, FakeRewardModel
from verl.errors import EngineError, ProcessLostError, WorkerTimeoutError
from verl.rewards.models.interface import ScoringFailure
from verl.rewards.settings import RewardModelSettings
from verl.rollout.replica_pool import MAX_LOSSES
from verl.workers import rewards
from verl.workers.rewards import RewardActor, RewardModelPool

pytestmark = pytest.mark.unit

LOAD_S = 30.0


class Model:
    """Scores with its own number, one conversation after the other; dies, hangs and starts as configured."""

    def __init__(self, number: float, seconds: float = 1.0) -> None:
        self.number, self.seconds = number, seconds
        self.asked: list[list[int]] = []
        self.poison: list[int] | None = None  # a conversation that ends the process
        self.hangs, self.starts, self.ended, self.reports = False, 0, 0, list[str]()
        self.refusals: list[Exception] = []  # of the next starts
        self._is_up, self._death, self._turn = True, asyncio.Event(), asyncio.Lock()

    async def score(self, token_ids: Sequence[int]) -> float | ScoringFailure:
        self.asked.append(list(token_ids))
        return await self._before_death(self._score(list(token_ids)))

    async def _score(self, token_ids: list[int]) -> float:
        async with self._turn:
            await asyncio.sleep(self.seconds)
            if token_ids == self.poison:
                self.die()
            while self.hangs:
                await asyncio.sleep(1)
            return self.number

    async def is_ready(self) -> bool:
        if self.hangs:
            await asyncio.sleep(60)
            raise WorkerTimeoutError("waited 60 s for reward model to ready and gave up")
        if self._death.is_set():
            raise ProcessLostError("ready: its process has died")
        return self._is_up

    async def start(self) -> None:
        self.starts += 1
        self._death.clear()  # there is a new process
        await self._before_death(asyncio.sleep(LOAD_S))
        if self.refusals:
            raise self.refusals.pop(0)
        self._is_up = True

    async def end(self) -> None:
        self.ended += 1
        self.die()

    async def report_lost(self, reason: str) -> None:
        self.reports.append(reason)

    def die(self) -> None:
        self._is_up = self.hangs = False
        self._death.set()

    async def _before_death(self, work: Coroutine[Any, Any, Any]) -> Any:
        working, death = asyncio.ensure_future(work), asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.wait([working, death], return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                raise ProcessLostError("score: its process has died")
            return working.result()
        finally:
            working.cancel()
            death.cancel()


def in_simulated_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        simulate(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def after(seconds: float, act: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, act)


def scored(pool: RewardModelPool, conversations: Sequence[list[int]]) -> asyncio.Future[list[float | ScoringFailure]]:
    return asyncio.gather(*(pool.score(tokens) for tokens in conversations))


@in_simulated_time
async def test_each_conversation_goes_to_the_model_with_the_fewest_tokens_to_read() -> None:
    found = await scored(RewardModelPool([Model(1), Model(2)]), [[7] * length for length in (5, 1, 1, 1)])
    assert found in ([1, 2, 2, 2], [2, 1, 1, 1])


@in_simulated_time
async def test_conversations_of_a_dead_model_are_scored_by_the_others() -> None:
    lost, other = Model(1), Model(2)
    pool = RewardModelPool([lost, other])
    after(0.5, lost.die)
    assert await scored(pool, [[number] for number in range(8)]) == [2] * 8
    assert len(lost.asked) == 4
    assert sorted(other.asked) == [[number] for number in range(8)]
    assert asyncio.get_running_loop().time() < LOAD_S
    assert list_loads(pool) == (0, 0)


@in_simulated_time
async def test_a_model_that_died_is_reported_once_restarted_and_used_again() -> None:
    lost, other = Model(1), Model(2)
    pool = RewardModelPool([lost, other])
    after(0.5, lost.die)
    await scored(pool, [[number] for number in range(8)])
    await asyncio.sleep(LOAD_S)
    assert lost.reports == ["score: its process has died"]
    assert (lost.starts, lost.ended) == (1, 0)
    assert set(await scored(pool, [[number] for number in range(8)])) == {1, 2}


@in_simulated_time
async def test_the_only_model_scores_its_conversations_after_its_restart() -> None:
    only = Model(1)
    after(2.5, only.die)
    assert await scored(RewardModelPool([only]), [[number] for number in range(8)]) == [1] * 8
    assert LOAD_S < asyncio.get_running_loop().time() < LOAD_S + 20


@in_simulated_time
async def test_if_no_model_recovers_all_requests_fail_after_one_timeout_with_the_reason() -> None:
    lost = Model(1)
    lost.refusals = [EngineError("no memory left on the device")] * 100
    lost.die()
    pool = RewardModelPool([lost], recovery_timeout_s=1260)
    for failed in (*await scored(pool, [[1], [2], [3]]), await pool.score([4])):
        assert isinstance(failed, ScoringFailure)
        assert failed.kind == "died"
        assert "no reward model recovered within 1260 s" in failed.message
        assert "its process has died; and it did not start again: no memory left on the device" in failed.message
        assert "micro_batch_size_per_gpu" in failed.fix
    assert asyncio.get_running_loop().time() == pytest.approx(1260)
    assert 2 < lost.ended < 30, "each try has a process of its own, after ever longer pauses"


@in_simulated_time
async def test_a_slow_model_is_waited_for_as_long_as_it_lives() -> None:
    slow = Model(1, seconds=10_000)
    assert await RewardModelPool([slow], heartbeat_s=60).score([7]) == 1
    assert slow.starts == 0


@in_simulated_time
async def test_a_model_that_does_not_reply_is_ended_and_restarted() -> None:
    hung = Model(1)
    hung.hangs = True
    assert await RewardModelPool([hung], heartbeat_s=60).score([7]) == 1
    assert hung.reports == ["waited 60 s for reward model to ready and gave up"]
    assert (hung.ended, hung.starts) == (1, 1)


@in_simulated_time
async def test_a_start_that_hangs_is_ended_and_retried() -> None:
    lost = Model(1)
    lost.refusals = [WorkerTimeoutError("waited 1200 s for reward model 0 to start and gave up")]
    lost.die()
    assert await RewardModelPool([lost]).score([7]) == 1
    assert (lost.ended, lost.starts) == (1, 2)


@in_simulated_time
async def test_a_conversation_that_kills_every_model_fails_and_others_do_not() -> None:
    models = [Model(1), Model(1)]
    for model in models:
        model.poison = [6, 6, 6]
    conversations = [[number] for number in range(20)]
    *others, failed = await scored(RewardModelPool(models), [*conversations, [6, 6, 6]])
    assert others == [1] * 20
    assert isinstance(failed, ScoringFailure)
    assert failed.kind == "died"
    assert f"lost its process {MAX_LOSSES} times while it scored a conversation of 3 tokens" in failed.message
    assert sum(model.asked.count([6, 6, 6]) for model in models) == MAX_LOSSES


@in_simulated_time
async def test_a_conversation_is_not_blamed_for_models_that_were_lost_before_it() -> None:
    models = [Model(number) for number in range(2 * MAX_LOSSES)]
    for model in models:
        model.die()
    found = await RewardModelPool(models).score([7])
    assert not isinstance(found, ScoringFailure)
    assert sum(len(model.asked) for model in models) == 2


def settings() -> RewardModelSettings:
    return RewardModelSettings(FACTORY, "", batch=2, deadline_s=60)


async def test_an_actor_scores_in_batches_by_the_model_that_its_settings_name() -> None:
    actor = RewardActor(settings())
    await actor.start()
    assert await asyncio.gather(*(actor.score([number]) for number in range(5))) == [0, 1, 2, 3, 4]
    assert isinstance(await actor.score([FakeRewardModel().vocabulary]), ScoringFailure)
    await actor.close()


async def test_a_new_actor_is_lost_until_it_is_started() -> None:
    actor = RewardActor(settings())
    assert not await actor.is_ready()
    with pytest.raises(ProcessLostError, match="has not loaded the model yet"):
        await actor.score([1])
    await actor.start()
    assert await actor.is_ready()
    assert await actor.score([1]) == 1


async def test_concurrent_starts_load_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [FakeRewardModel()]
    monkeypatch.setattr(rewards, "_make_model", lambda *_: made.pop())
    actor = RewardActor(settings())
    await asyncio.gather(*(actor.start() for _ in range(3)))
    assert await actor.score([1]) == 1


async def test_an_actor_replaces_a_model_that_lost_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(FakeRewardModel):
        is_closed = False

        async def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
            raise ProcessLostError("vLLM's engine process has died")

        async def close(self) -> None:
            self.is_closed = True

    dead = Dead()
    made = [FakeRewardModel(), dead]
    monkeypatch.setattr(rewards, "_make_model", lambda *_: made.pop())
    actor = RewardActor(settings())
    await actor.start()
    outcomes = await asyncio.gather(*(actor.score([number]) for number in range(5)), return_exceptions=True)
    assert all(isinstance(outcome, ProcessLostError) for outcome in outcomes)
    assert not await actor.is_ready()
    await actor.start()
    assert dead.is_closed
    assert await actor.score([1]) == 1
