"""The pool sends a request to the engine with the least to do, and once more elsewhere when that one is lost."""

import asyncio
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from observed_pool import ObservedPool
from simulated_clock import simulate

from tests.fake_rollout_engine import FakeRolloutEngine
from verl.errors import EngineError, ProcessLostError
from verl.rollout.completions import PartialResponse
from verl.rollout.engine import EngineView
from verl.rollout.replica_pool import MAX_LOSSES, SPILL, Request
from verl.rollout.supervisor import EngineState
from verl.types import Completion, SamplingParams

pytestmark = pytest.mark.unit

READY, LOST = EngineState.READY, EngineState.LOST
SHORT = SamplingParams(max_tokens=4, seed=7)


class Engine(FakeRolloutEngine):
    """One second a token; counts, dies and hangs on demand."""

    def __init__(self, seconds_per_token: float = 1.0) -> None:
        super().__init__(seconds_per_token=seconds_per_token)
        self.requests: list[Request] = []
        self.batches: list[list[Request]] = []
        self.is_up, self.hangs, self.was_shut = True, False, ""
        self._running: set[asyncio.Task[object]] = set()

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        self.requests.append((token_ids, sampling))
        return await self._until_death(super().generate(token_ids, sampling))

    async def generate_all(self, requests: Sequence[Request]) -> list[Completion]:
        self.batches.append(list(requests))
        return await self._until_death(super().generate_all(requests))

    async def is_ready(self) -> bool:
        if not self.is_up:
            raise ProcessLostError("no process")
        return not self.was_shut

    async def disable(self, why: str) -> None:
        self.was_shut = why

    def die(self) -> None:
        self.is_up = False
        for task in self._running:
            task.cancel("died")

    def come_back(self) -> None:
        self.is_up, self.hangs, self.was_shut = True, False, ""

    async def _until_death(self, answer):  # type: ignore[no-untyped-def]
        if not self.is_up:
            answer.close()
            raise ProcessLostError("no process")
        task = asyncio.ensure_future(answer)
        self._running.add(task)
        try:
            await asyncio.wait([task])
            while self.hangs:
                await asyncio.sleep(1)
        finally:
            self._running.discard(task)
        if task.cancelled():
            raise ProcessLostError("killed")
        return task.result()


def in_simulated_time(test):  # type: ignore[no-untyped-def]
    def run() -> None:
        simulate(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_simulated_time
async def test_requests_of_one_size_are_spread_evenly() -> None:
    engines = [Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines))
    await asyncio.gather(*(pool.generate([1, token], SHORT) for token in range(10)))
    assert [len(engine.requests) for engine in engines] == [5, 5]
    assert pool.load == (0, 0)


@in_simulated_time
async def test_a_long_request_keeps_others_away_from_its_engine() -> None:
    engines = [Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines))
    sizes = [40, *[4] * 6]
    await asyncio.gather(*(pool.generate([1], SamplingParams(max_tokens=size)) for size in sizes))
    assert sorted(len(engine.requests) for engine in engines) == [1, 6]


@in_simulated_time
async def test_requests_of_an_engine_that_dies_run_again_elsewhere_exactly_as_they_were_asked() -> None:
    engines = [Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines))
    asked = [pool.generate([number], SamplingParams(max_tokens=9, seed=number)) for number in range(6)]
    answers = asyncio.gather(*asked)
    await asyncio.sleep(2)
    engines[0].die()
    alone = FakeRolloutEngine()
    assert [answer.token_ids for answer in await answers] == [
        (await alone.generate([n], SamplingParams(max_tokens=9, seed=n))).token_ids for n in range(6)
    ]
    assert len(engines[1].requests) == 6
    assert all(request in engines[1].requests for request in engines[0].requests)
    assert (pool.losses, pool.retries, pool.load) == (1, 3, (0, 0))
    assert pool.states == {0: LOST, 1: READY}


@in_simulated_time
async def test_an_engine_that_recovers_is_used_again() -> None:
    engines = [Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines))
    engines[0].die()
    await asyncio.gather(*(pool.generate([token], SHORT) for token in range(4)))
    assert pool.states == {0: LOST, 1: READY}
    engines[0].come_back()
    await asyncio.sleep(2)
    assert pool.states == {0: READY, 1: READY}
    await asyncio.gather(*(pool.generate([token], SHORT) for token in range(4)))
    assert len(engines[0].requests) >= 2


@in_simulated_time
async def test_an_engine_with_an_unexpected_error_is_polled_again() -> None:
    class Confused(Engine):
        asked = 0

        async def is_ready(self) -> bool:
            self.asked += 1
            if self.asked < 3:
                raise AttributeError("half started")
            return await super().is_ready()

    engine = Confused()
    engine.die()
    asyncio.get_running_loop().call_later(1, engine.come_back)
    await ObservedPool(EngineView.of([engine])).generate([1], SHORT)
    assert engine.asked >= 3


@in_simulated_time
async def test_requests_wait_for_the_first_engine_that_recovers() -> None:
    engines = [Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines))
    for engine in engines:
        engine.die()
    asyncio.get_running_loop().call_later(100, engines[1].come_back)
    await asyncio.gather(*(pool.generate([1], SHORT) for _ in range(4)))
    assert 100 <= asyncio.get_running_loop().time() <= 110


@in_simulated_time
async def test_requests_fail_with_the_reasons_if_no_engine_recovers() -> None:
    engines = [Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines), recovery_timeout_s=300)
    for engine in engines:
        engine.die()
    with pytest.raises(EngineError, match=r"recovered within 300 s.*engine 0: no process; engine 1: no process"):
        await pool.generate([1], SHORT)


@in_simulated_time
async def test_an_engine_that_finishes_nothing_is_disabled_and_its_requests_are_retried() -> None:
    engines = [Engine(), Engine()]
    engines[0].hangs = True
    pool = ObservedPool(EngineView.of(engines), stall_timeout_s=50)
    await asyncio.gather(*(pool.generate([1, 2, token], SamplingParams(max_tokens=8)) for token in range(2)))
    await asyncio.sleep(10)
    assert "engine 0 has finished no request for 50 s, with 11 tokens" in engines[0].was_shut
    assert pool.states == {0: LOST, 1: READY}


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf"), 0.5])
def test_an_engine_with_impossible_log_probs_is_disabled_and_its_requests_are_retried(wrong: float) -> None:
    class Corrupt(Engine):
        async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
            completion = await super().generate(token_ids, sampling)
            completion.logprobs[-1] = wrong
            return completion

    async def play() -> None:
        engines = [Corrupt(), Engine()]
        pool = ObservedPool(EngineView.of(engines))
        replies = await asyncio.gather(*(pool.generate([1, 2, token], SHORT) for token in range(2)))
        batch = await pool.generate_all([([1], SHORT)] * 2)
        await asyncio.sleep(10)
        assert [reply.engine for reply in [*replies, *batch]] == [1] * 4
        assert f"it returned a log-prob of {wrong:g} in a response of 4 tokens" in engines[0].was_shut
        assert pool.states == {0: LOST, 1: READY}

    simulate(play())


@in_simulated_time
async def test_a_request_that_waits_behind_others_is_not_taken_for_a_hang() -> None:
    class OneAtATime(Engine):
        turn = asyncio.Lock()

        async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
            async with self.turn:
                return await super().generate(token_ids, sampling)

    pool = ObservedPool(EngineView.of([OneAtATime()]), stall_timeout_s=10)
    assert len(await asyncio.gather(*(pool.generate([1], SHORT) for _ in range(8)))) == 8  # the last waits 32 s
    assert pool.losses == 0


@in_simulated_time
async def test_a_request_that_crashes_every_engine_is_named() -> None:
    class Fragile(Engine):
        async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
            if token_ids == [6, 6, 6]:
                asyncio.get_running_loop().call_later(1, self.die)
                asyncio.get_running_loop().call_later(30, self.come_back)
            return await super().generate(token_ids, sampling)

    engines = [Fragile(), Fragile()]
    pool = ObservedPool(EngineView.of(engines))
    with pytest.raises(EngineError, match=r"3 tokens that begin with \[6, 6, 6\].*engine 0: killed"):
        await pool.generate([6, 6, 6], SHORT)
    assert sum(len(engine.requests) for engine in engines) == MAX_LOSSES


@in_simulated_time
async def test_a_request_is_not_blamed_for_engines_that_were_lost_before_it() -> None:
    engines = [Engine() for _ in range(2 * MAX_LOSSES)]
    pool = ObservedPool(EngineView.of(engines))
    for engine in engines:
        engine.die()
    asyncio.get_running_loop().call_later(60, engines[0].come_back)
    await pool.generate([1], SHORT)
    assert sum(len(engine.requests) for engine in engines) == 2


@in_simulated_time
async def test_an_error_of_a_request_does_not_lose_its_engine() -> None:
    class Refusing(Engine):
        async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
            raise EngineError("longer than max_model_len")

    pool = ObservedPool(EngineView.of([Refusing()]))
    with pytest.raises(EngineError, match="max_model_len"):
        await pool.generate([1], SHORT)
    assert pool.states == {0: READY}


@in_simulated_time
async def test_a_batch_is_split_over_the_engines_and_replies_keep_their_order() -> None:
    engines = [Engine(), Engine(), Engine()]
    requests = [([number], SamplingParams(max_tokens=3, seed=number)) for number in range(7)]
    answers = await ObservedPool(EngineView.of(engines)).generate_all(requests)
    assert [engine.batches for engine in engines] == [[requests[place::3]] for place in range(3)]
    alone = FakeRolloutEngine()
    assert [answer.token_ids for answer in answers] == [(await alone.generate(*r)).token_ids for r in requests]


@in_simulated_time
async def test_the_batch_of_a_lost_engine_is_retried_unchanged_and_alone() -> None:
    engines = [Engine(), Engine()]
    requests = [([number], SamplingParams(max_tokens=3, seed=number)) for number in range(5)]
    asyncio.get_running_loop().call_later(1, engines[0].die)
    await ObservedPool(EngineView.of(engines)).generate_all(requests)
    assert engines[1].batches == [requests[1::2], requests[0::2]]
    assert asyncio.get_running_loop().time() == pytest.approx(6)  # one after the other


@in_simulated_time
async def test_a_batch_may_have_fewer_requests_than_engines_or_none() -> None:
    engines = [Engine(), Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines))
    assert await pool.generate_all([]) == []
    assert len(await pool.generate_all([([1], SHORT)])) == 1
    assert [len(engine.batches) for engine in engines] == [1, 0, 0]


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(EngineError, match="num_engines"):
        ObservedPool(EngineView.of([]))


@in_simulated_time
async def test_responses_to_a_prompt_go_to_one_engine_and_other_prompts_elsewhere() -> None:
    engines = [Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines))
    prompts = [[1, 2], [3, 4]]
    await asyncio.gather(*(pool.generate(prompt, SHORT) for prompt in prompts for _ in range(8)))
    assert sorted([*prompt] for engine in engines for prompt in {tuple(one) for one, _ in engine.requests}) == prompts
    assert [len(engine.requests) for engine in engines] == [8, 8]


@in_simulated_time
async def test_a_prompt_with_many_responses_spills_over_to_idle_engines() -> None:
    engines = [Engine() for _ in range(4)]
    pool = ObservedPool(EngineView.of(engines))
    await asyncio.gather(*(pool.generate([1, 2], SHORT) for _ in range(64)))
    assert (
        max(len(engine.requests) for engine in engines) - min(len(engine.requests) for engine in engines) <= SPILL + 1
    )


@in_simulated_time
async def test_finished_prompts_are_forgotten() -> None:
    pool = ObservedPool(EngineView.of([Engine(), Engine()]))
    await asyncio.gather(*(pool.generate([prompt], SHORT) for prompt in range(10)))
    assert not pool._affinities


@in_simulated_time
async def test_the_turns_of_an_episode_stay_on_one_engine() -> None:
    engines = [Engine(), Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines))
    generate = pool.start_episode()
    used = []
    for turn in range(6):
        used.append((await generate([1, 2, *range(turn)], SHORT)).engine)
        await asyncio.gather(*(pool.generate([50 + turn, other], SHORT) for other in range(3)))
    assert len(set(used)) == 1


@in_simulated_time
async def test_an_episode_leaves_an_engine_that_is_lost() -> None:
    engines = [Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines))
    generate = pool.start_episode()
    first = (await generate([1], SHORT)).engine
    engines[first].die()
    second = (await generate([1, 2], SHORT)).engine
    assert second == 1 - first
    assert (await generate([1, 2, 3], SHORT)).engine == second  # it does not go back


def view(version: int, engines: dict[int, Engine]) -> EngineView:
    return EngineView(version, engines)


@in_simulated_time
async def test_an_engine_that_joined_gets_requests() -> None:
    engines = [Engine(), Engine()]
    pool = ObservedPool(view(0, {0: engines[0]}))
    running = [asyncio.ensure_future(pool.generate([prompt], SHORT)) for prompt in range(4)]
    await asyncio.sleep(0)
    await pool.update(view(1, {0: engines[0], 7: engines[1]}))
    assert [(await pool.generate([9, prompt], SHORT)).engine for prompt in range(2)] == [7, 7]
    await asyncio.gather(*running)
    assert pool.states == {0: READY, 7: READY}


@in_simulated_time
async def test_an_engine_that_sleeps_gets_requests_only_if_no_other_is_ready() -> None:
    engines = [Engine(), Engine()]
    present = dict(enumerate(engines))
    pool = ObservedPool(view(0, present))
    generate = pool.start_episode()
    first = (await generate([1], SHORT)).engine
    await pool.update(EngineView(1, present, frozenset({first})))
    assert (await generate([1, 2], SHORT)).engine == 1 - first, "a turn does not wait for the engine that knows it"
    replies = await asyncio.gather(*(pool.generate([prompt], SHORT) for prompt in range(6)))
    assert {reply.engine for reply in replies} == {1 - first}
    engines[1 - first].die()
    assert (await pool.generate([7], SHORT)).engine == first
    await pool.update(view(2, present))
    assert (await pool.generate([8], SHORT)).engine == first, "the other is lost"


@in_simulated_time
async def test_an_engine_that_left_finishes_its_requests_and_gets_no_more() -> None:
    engines = [Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines))
    running = [asyncio.ensure_future(pool.generate([prompt], SHORT)) for prompt in range(4)]
    await asyncio.sleep(1)
    updating = asyncio.ensure_future(pool.update(view(1, {1: engines[1]})))
    later = [asyncio.ensure_future(pool.generate([9, prompt], SHORT)) for prompt in range(4)]
    await updating
    assert asyncio.get_running_loop().time() == 4, "a response takes four seconds"
    assert [(await reply).engine for reply in later] == [1] * 4
    assert sorted([(await reply).engine for reply in running]) == [0, 0, 1, 1]
    assert [len(engine.requests) for engine in engines] == [2, 6]
    assert pool.states == {1: READY}


@in_simulated_time
async def test_requests_on_an_engine_that_ends_when_it_leaves_run_again_without_blame() -> None:
    engines = [Engine() for _ in range(MAX_LOSSES + 3)]
    present = dict(enumerate(engines))
    pool = ObservedPool(view(0, present))
    reply = asyncio.ensure_future(pool.generate([1], SHORT))
    for version in range(1, MAX_LOSSES + 2):
        await asyncio.sleep(1)
        [busy] = [engine_id for engine_id, engine in present.items() if engine._running]
        present = {engine_id: engine for engine_id, engine in present.items() if engine_id != busy}
        updating = asyncio.ensure_future(pool.update(view(version, present)))
        await asyncio.sleep(0)
        engines[busy].die()
        await updating
    assert len((await reply).token_ids) == SHORT.max_tokens
    assert (pool.retries, pool.losses) == (MAX_LOSSES + 1, 0)


@in_simulated_time
async def test_an_older_view_that_arrives_late_is_ignored() -> None:
    engines = [Engine(), Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines))
    await pool.update(view(2, {1: engines[1], 2: engines[2]}))
    await pool.update(view(1, dict(enumerate(engines))))
    assert pool.states == {1: READY, 2: READY}


@in_simulated_time
async def test_a_lost_engine_that_leaves_is_not_polled_any_more() -> None:
    engines = [Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines))
    engines[0].die()
    await asyncio.gather(*(pool.generate([prompt], SHORT) for prompt in range(2)))
    assert pool.states == {0: LOST, 1: READY}
    await pool.update(view(1, {1: engines[1]}))
    engines[0].come_back()
    await asyncio.sleep(60)
    assert pool.states == {1: READY}


@in_simulated_time
async def test_an_episode_moves_on_when_its_engine_left() -> None:
    engines = [Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines))
    generate = pool.start_episode()
    first = (await generate([1], SHORT)).engine
    await pool.update(view(1, {1 - first: engines[1 - first]}))
    assert (await generate([1, 2], SHORT)).engine == 1 - first


@in_simulated_time
async def test_without_engines_requests_and_batches_wait_for_one_that_joins() -> None:
    engines = [Engine(), Engine()]
    pool = ObservedPool(EngineView.of(engines[:1]))
    await pool.update(view(1, {}))
    waiting = asyncio.gather(pool.generate([1], SHORT), pool.generate_all([([2], SHORT), ([3], SHORT)]))
    await asyncio.sleep(100)
    await pool.update(view(2, {1: engines[1]}))
    reply, batch = await waiting
    assert {reply.engine, *(each.engine for each in batch)} == {1}


class Interrupted(Engine):
    """Dies after `count` tokens of each response, and keeps what it has generated."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        whole = await super().generate(token_ids, sampling)
        if not self.count:
            return whole
        self.is_up = False
        error = ProcessLostError("killed")
        logprobs, versions = whole.logprobs[: self.count], whole.versions[: self.count]
        error.partial = Completion(whole.token_ids[: self.count], logprobs, versions, "abort", preemptions=2)
        self.count = 0
        raise pickle.loads(pickle.dumps(error))  # it comes from another process


@in_simulated_time
async def test_another_engine_continues_what_a_lost_one_has_generated() -> None:
    first, second = Interrupted(3), Interrupted(0)
    second._version = 1
    pool = ObservedPool(EngineView.of([first, second]))
    pool._replicas[0].tie_break = -1.0
    response = await pool.generate([1, 2], SamplingParams(max_tokens=10))
    [asked] = first.requests
    assert asked[1].max_tokens == 10
    tokens, sampling = second.requests[-1]
    assert (list(tokens), sampling.max_tokens) == ([1, 2, *response.token_ids[:3]], 7)
    assert response.versions.tolist() == [-1] * 3 + [1] * 7
    assert (len(response.token_ids), len(response.logprobs), response.finish_reason) == (10, 10, "length")
    assert response.preemptions == 2
    assert (response.engine, response.earlier_engines) == (1, {0})


@in_simulated_time
async def test_a_response_with_a_seed_starts_again() -> None:
    first, second = Interrupted(3), Interrupted(0)
    pool = ObservedPool(EngineView.of([first, second]))
    pool._replicas[0].tie_break = -1.0
    response = await pool.generate([1, 2], SamplingParams(max_tokens=10, seed=7))
    assert second.requests[-1] == ([1, 2], SamplingParams(max_tokens=10, seed=7))
    assert response.token_ids == (await FakeRolloutEngine().generate([1, 2], SamplingParams(10, seed=7))).token_ids


@pytest.mark.parametrize(
    ("sampling", "reason"), [(SamplingParams(3), "length"), (SamplingParams(9, stop_token_ids=(0,)), "stop")]
)
def test_a_response_of_which_only_the_end_was_lost_is_not_continued(sampling: SamplingParams, reason: str) -> None:
    class Dying(Engine):
        async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
            error, numbers = ProcessLostError("killed"), np.zeros(3, np.float32)
            error.partial = Completion([5, 4, 0], numbers, numbers.astype(np.int32), "abort")
            raise error

    async def run() -> Completion:
        response = PartialResponse([1], sampling)
        with pytest.raises(ProcessLostError):
            await response.complete(Dying(), 0)
        return await response.complete(Dying(), 1)

    response = asyncio.run(run())
    assert (response.token_ids, response.finish_reason) == ([5, 4, 0], reason)


async def test_a_continued_response_has_the_kept_ids_of_all_its_tokens() -> None:
    class Masked(Engine):
        def __init__(self, *, dies: bool) -> None:
            super().__init__()
            self.dies = dies

        async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
            tokens = list(range(len(token_ids), len(token_ids) + (2 if self.dies else sampling.max_tokens)))
            logprobs, versions = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
            kept = np.array([[token, token + 1] for token in tokens], np.int32)
            completion = Completion(tokens, logprobs, versions, "length", kept_ids=kept)
            if not self.dies:
                return completion
            error = ProcessLostError("killed")
            error.partial = completion
            raise error

    response = PartialResponse([1], SamplingParams(5, top_k=1, keep_sampling_mask=True))
    with pytest.raises(ProcessLostError):
        await response.complete(Masked(dies=True), 0)
    whole = await response.complete(Masked(dies=False), 1)
    assert whole.kept_ids is not None
    assert whole.kept_ids[:, 0].tolist() == whole.token_ids == [1, 2, 3, 4, 5]
