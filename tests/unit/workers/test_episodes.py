"""Episode workers turn prompts into sample handles; the pool distributes requests over them."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from agent_config import agent_config
from simulated_clock import simulate

from verl.agents.episode import EpisodeRunner
from verl.agents.transcript import Transcript
from verl.cluster.hangs.pending_calls import DEFAULT_TIMEOUTS, Timeout
from verl.config.schema import Config
from verl.config.schema.data import DataConfig
from verl.config.schema.reward import OverlongBuffer, RewardConfig
from verl.errors import ProcessLostError
from verl.rollout.engine import EngineView
from verl.types import Completion, Prompt, Sample, SamplePreview, SamplingParams, Scored
from verl.workers import episodes
from verl.workers.episode_pool import EpisodePool
from verl.workers.episodes import EpisodeSettings, EpisodeWorker, GroupRequest

pytestmark = pytest.mark.unit

SAMPLING = SamplingParams(max_tokens=4)


async def generate(token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
    return Completion([sampling.seed or 0, 9], [-0.5, -0.5], [3, 2], "stop")


async def score(prompt: Prompt, transcript: Transcript, response: str) -> Scored:
    return Scored(float(response), {})


@pytest.fixture
def worker() -> EpisodeWorker:
    """A worker as `start` leaves it."""
    reward = RewardConfig(overlong_buffer=OverlongBuffer(enable=True, len=2))
    config = Config(reward=reward, data=DataConfig(max_response_length=2))
    made = EpisodeWorker(EpisodeSettings(config, {}), EngineView.of([]))
    prompts: Any = [Prompt(row=0, token_ids=[1], data_source="sums", ground_truth="46")]
    made._datasets = {"train": prompts, "val": prompts}
    made._runner = EpisodeRunner(generate, score, lambda tokens: str(tokens[0]))
    return made


def make_idle() -> EpisodeWorker:
    return EpisodeWorker(EpisodeSettings(Config(), {}), EngineView.of([]))


async def test_handles_have_the_index_of_their_seed(worker: EpisodeWorker) -> None:
    handles = await worker.run(GroupRequest("val", 0, 8, [5, 6, 7], SAMPLING))
    assert [(handle.group, handle.index, handle.score) for handle in handles] == [
        (8, 0, 5.0),
        (8, 1, 6.0),
        (8, 2, 7.0),
    ]
    first = handles[0]
    assert isinstance(first.ref.get(), Sample)
    assert (first.tokens, first.generated, first.version, first.baseline) == (3, 2, 2, None)


async def test_handles_carry_the_score_of_the_greedy_response(worker: EpisodeWorker) -> None:
    handles = await worker.run(GroupRequest("val", 0, 8, [5, 6], SAMPLING, greedy_baseline=True))
    assert [(handle.score, handle.baseline) for handle in handles] == [(5.0, 0.0), (6.0, 0.0)]


async def test_the_overlong_penalty_applies_to_training_only(worker: EpisodeWorker) -> None:
    [trained] = await worker.run(GroupRequest("train", 0, 8, [5], SAMPLING))
    assert (trained.score, trained.metrics) == (4.0, {"raw_score": 5.0, "overlong_penalty": -1.0})
    [validated] = await worker.run(GroupRequest("val", 0, 8, [5], SAMPLING))
    assert (validated.score, validated.metrics) == (5.0, {})


async def test_a_pool_passes_requests_to_its_workers_in_turn(worker: EpisodeWorker) -> None:
    actor = SimpleNamespace(run=SimpleNamespace(remote=worker.run))
    idle = SimpleNamespace(run=SimpleNamespace(remote=None))
    [handle] = await EpisodePool([actor, idle]).run(GroupRequest("train", 0, 8, [5], SAMPLING, greedy_baseline=True))
    assert (handle.score, handle.baseline) == (4.0, -1.0)


def test_requests_wait_as_long_as_training_and_restarts_of_engines_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(DEFAULT_TIMEOUTS, generation=Timeout(5000.0), start=Timeout(100.0))
    config = Config()
    down_s = limits.generation.seconds + config.trainer.faults.max_engine_restarts * 2 * limits.start.seconds

    class Engine:
        async def is_ready(self) -> bool:
            return asyncio.get_running_loop().time() > down_s

        async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
            if not await self.is_ready():
                raise ProcessLostError("its process has died")
            return Completion([9], np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")

    async def ask() -> Completion:
        worker = EpisodeWorker(EpisodeSettings(config, {}, timeouts=limits), EngineView.of([Engine()]))
        await worker.start()
        return await worker._pool.generate([1], SAMPLING)

    monkeypatch.setattr(episodes, "load_tokenizer", lambda *_, **__: None)
    assert simulate(ask()).token_ids == [9]


async def test_all_workers_follow_the_engines_that_join_and_leave(worker: EpisodeWorker) -> None:
    views: list[EngineView] = []

    async def update(view: EngineView) -> None:
        views.append(view)

    other = make_idle()
    for each in (worker, other):
        each._pool = SimpleNamespace(update=update)  # type: ignore[assignment]
    actors = [SimpleNamespace(update_engines=SimpleNamespace(remote=each.update_engines)) for each in (worker, other)]
    view = EngineView(1, {4: object()})
    await EpisodePool(actors).update_engines(view)
    assert views == [view, view]


async def test_one_of_the_latest_samples_can_be_previewed(worker: EpisodeWorker) -> None:
    actor = SimpleNamespace(
        run=SimpleNamespace(remote=worker.run), preview_sample=SimpleNamespace(remote=worker.preview_sample)
    )
    idle = SimpleNamespace(preview_sample=SimpleNamespace(remote=make_idle().preview_sample))
    pool = EpisodePool([idle, actor])
    assert await pool.preview_sample("val") is None
    await worker.run(GroupRequest("val", 0, 8, [5, 6], SAMPLING))
    await worker.run(GroupRequest("train", 0, 9, [7], SAMPLING))
    assert await pool.preview_sample("val") == SamplePreview("sums", "5", "46", 5.0)
    assert await pool.preview_sample("val", "sums") == await pool.preview_sample("val")
    assert await pool.preview_sample("val", "others") is None


async def test_a_row_that_is_dropped_returns_none(worker: EpisodeWorker) -> None:
    worker._datasets["train"] = [None]  # type: ignore[assignment]
    assert await worker.run(GroupRequest("train", 0, 8, [5], SAMPLING)) is None


async def test_a_round_generates_all_its_responses_in_one_ordered_batch(worker: EpisodeWorker) -> None:
    asked = []

    async def generate_all(requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        asked.append([sampling.seed for _, sampling in requests])
        return [await generate(*request) for request in requests]

    worker._pool = SimpleNamespace(generate_all=generate_all)  # type: ignore[assignment]
    worker._datasets["train"] = [worker._datasets["val"][0], None]  # type: ignore[assignment,list-item]
    requests = [
        GroupRequest("train", 0, 8, [5, 6], SAMPLING),
        GroupRequest("train", 1, 9, [1], SAMPLING),
        GroupRequest("train", 0, 10, [7], SAMPLING),
    ]
    first, dropped, last = await worker.run_round(requests)
    assert asked == [[5, 6, 7]]
    assert [handle.index for handle in first or ()] == [0, 1]
    assert dropped is None
    assert [handle.group for handle in last or ()] == [10]


async def test_requests_of_one_loop_turn_form_a_round_and_rounds_do_not_overlap() -> None:
    rounds: list[list[int]] = []
    playing = 0

    async def run_round(requests: Sequence[GroupRequest]) -> list[list[Any]]:
        nonlocal playing
        playing += 1
        assert playing == 1
        rounds.append([request.group for request in requests])
        await asyncio.sleep(0)
        playing -= 1
        return [[request.group] for request in requests]

    pool = EpisodePool([SimpleNamespace(run_round=SimpleNamespace(remote=run_round))], deterministic=True)
    first = [asyncio.ensure_future(pool.run(GroupRequest("train", 0, group, [1], SAMPLING))) for group in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = [asyncio.ensure_future(pool.run(GroupRequest("train", 0, group, [1], SAMPLING))) for group in (3, 4)]
    results: list[Any] = await asyncio.gather(*first, *second)
    assert rounds == [[0, 1, 2], [3, 4]]
    assert results == [[0], [1], [2], [3], [4]]


async def test_a_failed_round_fails_all_its_requests() -> None:
    async def run_round(requests: Sequence[GroupRequest]) -> None:
        raise ProcessLostError("gone")

    pool = EpisodePool([SimpleNamespace(run_round=SimpleNamespace(remote=run_round))], deterministic=True)
    requests = [pool.run(GroupRequest("train", 0, group, [1], SAMPLING)) for group in range(2)]
    failed = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(error) for error in failed] == [ProcessLostError] * 2


async def test_all_workers_start_at_the_same_time() -> None:
    begun, let_go = list[int](), asyncio.Event()

    def actor(number: int) -> Any:
        async def start() -> None:
            begun.append(number)
            await let_go.wait()

        silent = SimpleNamespace(remote=lambda *_: None)
        return SimpleNamespace(start=SimpleNamespace(remote=start), __ray_call__=silent)

    starting = asyncio.ensure_future(EpisodePool([actor(number) for number in range(3)]).start())
    for _ in range(20):
        await asyncio.sleep(0)
    assert begun == [0, 1, 2]
    let_go.set()
    await starting


async def test_a_response_whose_reward_lacks_a_component_is_a_failure_in_training_only(worker: EpisodeWorker) -> None:
    async def score(prompt: Prompt, transcript: Transcript, response: str) -> Scored:
        return Scored(1.0, {"correct": 1.0} if response == "5" else {"correct": 1.0, "format": 0.0})

    worker._settings = EpisodeSettings(Config(), {}, components=["score", "correct", "format"])
    worker._overlong = None
    worker._runner = EpisodeRunner(generate, score, lambda tokens: str(tokens[0]))
    missing, whole = await worker.run(GroupRequest("train", 0, 8, [5, 6], SAMPLING))
    assert (whole.failure, whole.metrics) == (None, {"correct": 1.0, "format": 0.0})
    assert missing.failure.kind == "invalid"
    assert "algorithm.reward_components=format: the reward of a response has no such number" in missing.failure.message
    assert "it has correct, score" in missing.failure.message
    assert "'5'" in missing.failure.message, "the response is shown"
    assert missing.ref is None, "it is not trained on"
    [validated] = await worker.run(GroupRequest("val", 0, 8, [5], SAMPLING))
    assert validated.failure is None


@pytest.mark.parametrize("scores_itself", [False, True])
async def test_the_failure_says_where_an_environment_or_agent_puts_a_component(
    worker: EpisodeWorker, scores_itself: bool
) -> None:
    config = agent_config("agents.py:agent") if scores_itself else Config()
    worker._settings = EpisodeSettings(config, {}, components=["format"])
    worker._overlong = None
    [missing] = await worker.run(GroupRequest("train", 0, 8, [5], SAMPLING))
    assert "in a dict next to 'score'" in missing.failure.message
    assert ("`Step.metrics`" in missing.failure.message) == scores_itself
    assert ("`model.transcript.metrics`" in missing.failure.message) == scores_itself


@pytest.mark.parametrize("scores_itself", [False, True])
async def test_an_episode_that_a_limit_ended_has_0_for_what_its_environment_had_not_set(
    worker: EpisodeWorker, scores_itself: bool
) -> None:
    async def cut(token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        return replace(await generate(token_ids, sampling), finish_reason="length")

    config = agent_config("agents.py:agent") if scores_itself else Config()
    worker._settings = EpisodeSettings(config, {}, components=["format"])
    worker._overlong = None
    worker._runner = EpisodeRunner(cut, score, lambda tokens: str(tokens[0]))
    [handle] = await worker.run(GroupRequest("train", 0, 8, [5], SAMPLING))
    assert (handle.failure is None) == scores_itself
    assert handle.metrics == ({"format": 0.0} if scores_itself else {})
