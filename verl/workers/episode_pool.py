"""The controller's side of the episode workers: their clients, the pool, and requests for groups of episodes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from verl.agents.deterministic_batcher import resolve_futures
from verl.cluster.actors import RemoteActor, kill_actor
from verl.cluster.device_pool import PlacementPool
from verl.cluster.hangs.pending_calls import DEFAULT_TIMEOUTS, HeartbeatMonitor, Timeouts
from verl.config.schema.root import Config
from verl.rewards.result import FailureTracker, truncate
from verl.rewards.reward_function import resolve_scorer
from verl.rollout.engine import EngineView
from verl.rollout.supervisor import EngineSupervisor
from verl.tracking.stages import Progress
from verl.types import SampleHandle, SamplePreview, SamplingParams
from verl.workers.episodes import EpisodeSettings, EpisodeWorker, GroupRequest
from verl.workers.rewards import RemoteRewardModel
from verl.workers.sample_rows import SampleFile


class RemoteEpisodeWorker(RemoteActor):
    """The client of one episode worker."""

    kind = "episode worker"
    methods: ClassVar = {"ping": "reply", "preview_sample": "reply"}

    def __init__(self, actor: Any, index: int, timeouts: Timeouts) -> None:
        super().__init__(actor, index, timeouts)
        self._heartbeat = HeartbeatMonitor(self.ping, timeouts.reply.seconds)

    async def run(self, method: str, work: Any) -> Any:
        """Run episodes without a timeout: engines and rewards have theirs, the worker only has to respond to pings."""
        return await self._heartbeat.watch(self._call(method, work, timeout=None))


class EpisodePool:
    """All episode workers: takes group requests, returns sample handles.

    `deterministic`: requests made in one turn of the event loop, such as all groups of a step, form one round, and
    rounds run one after the other, so that batch composition does not depend on timing. Needs a single worker.
    """

    def __init__(
        self, actors: Sequence[Any], *, deterministic: bool = False, timeouts: Timeouts = DEFAULT_TIMEOUTS
    ) -> None:
        self._workers = [RemoteEpisodeWorker(actor, index, timeouts) for index, actor in enumerate(actors)]
        self._turn = itertools.cycle(self._workers)
        self._deterministic = deterministic
        self._round: list[tuple[GroupRequest, asyncio.Future[list[SampleHandle] | None]]] = []
        self._round_lock = asyncio.Lock()

    @classmethod
    def spawn(
        cls,
        pool: PlacementPool,
        count: int,
        settings: EpisodeSettings,
        engines: EngineView,
        reward_models: Sequence[RemoteRewardModel] = (),
        *,
        deterministic: bool = False,
    ) -> EpisodePool:
        actors = [
            pool.spawn(EpisodeWorker, settings, engines, reward_models, is_async=True)
            for _ in range(1 if deterministic else count)
        ]
        return cls(actors, deterministic=deterministic, timeouts=settings.timeouts)

    async def start(self) -> None:
        await asyncio.gather(*(worker.start() for worker in self._workers))

    async def update_engines(self, view: EngineView) -> None:
        """Let all workers use these engines; return when no request runs on an engine that left."""
        await asyncio.gather(*(worker.run("update_engines", view) for worker in self._workers))

    async def run(self, request: GroupRequest) -> list[SampleHandle] | None:
        """Return the samples of one prompt in the order of the seeds, or None if the prompt was dropped as too long."""
        if not self._deterministic:
            return await next(self._turn).run("run", request)
        loop = asyncio.get_running_loop()
        if not self._round:
            loop.call_soon(lambda: asyncio.ensure_future(self._run_round()))
        result: asyncio.Future[list[SampleHandle] | None] = loop.create_future()
        self._round.append((request, result))
        return await result

    async def _run_round(self) -> None:
        pending, self._round = self._round, []
        async with self._round_lock:
            samples = self._workers[0].run("run_round", [request for request, _ in pending])
            await resolve_futures([result for _, result in pending], samples)

    async def preview_sample(self, split: str, data_source: str | None = None) -> SamplePreview | None:
        """Return one of the latest samples of a split and, if given, data source."""
        for worker in self._workers:
            if (preview := await worker.preview_sample(split, data_source)) is not None:
                return preview
        return None

    async def write_samples(self, file: SampleFile) -> int:
        """Write finished samples to a file; return its size in bytes."""
        size: int = await self._workers[-1].run("write_samples", file)
        return size

    def close(self) -> None:
        for worker in self._workers:
            kill_actor(worker.actor)


class EpisodeClient:
    """Runs groups of episodes. Requests fail as soon as no engine is left that could respond."""

    def __init__(
        self,
        config: Config,
        pool: EpisodePool,
        supervisor: EngineSupervisor,
        failures: FailureTracker,
        stop_token_ids: tuple[int, ...],
        *,
        greedy_baseline: bool = False,
    ) -> None:
        self._config, self._pool, self._supervisor, self.failures = config, pool, supervisor, failures
        self._sampling = _sampling_params(config, stop_token_ids)
        self._greedy_baseline = greedy_baseline
        self._started, self._finished = Counter[str](), Counter[str]()  # responses by split; of a step, or a validation
        self._began: dict[str, float] = {}

    def begin_step(self) -> None:
        """Count from here on the responses that are finished; those that still run belong to this step."""
        self._started["train"] -= self._finished["train"]
        self._finished["train"] = 0
        self._began["train"] = time.monotonic()

    def measure_progress(self, split: str) -> Progress:
        """Return how many responses of the step, or of the validation, are finished, and the time that others need."""
        finished, started = self._finished[split], self._started[split]
        if not finished:
            return Progress(0, started)
        left_s = (time.monotonic() - self._began[split]) * (started - finished) / finished
        return Progress(finished, started, left_s=left_s)

    async def run_group(self, position: int, row: int) -> list[SampleHandle] | None:
        """Return the scored samples of one training prompt; None if the prompt is too long."""
        handles = await self._run("train", row, position, self._config.actor_rollout_ref.rollout.n)
        return None if handles is None else self.failures.keep_scored(handles)

    async def run_validation(self, row: int) -> list[SampleHandle]:
        """Return the samples of one validation prompt."""
        handles = await self._run("val", row, row, self._config.actor_rollout_ref.rollout.val_kwargs.n)
        assert handles is not None, "validation prompts that are too long are dropped before the start"
        return handles

    async def preview(self, split: str, data_source: str | None = None) -> str:
        """Describe one of the latest responses and its score; empty if there is none."""
        sample = await self._pool.preview_sample(split, data_source)
        if sample is None:
            return ""
        scorer = resolve_scorer(self._config, sample.data_source)
        return (
            f"{scorer} gave {sample.score:g} to the response {truncate(sample.response)}; the ground truth is "
            f"{truncate(sample.ground_truth)}"
        )

    async def _run(self, split: str, row: int, group: int, count: int) -> list[SampleHandle] | None:
        seeds: list[int | None] = [None] * count
        if self._config.trainer.deterministic:
            seed = self._config.trainer.seed
            seeds = [SamplingParams.make_seed(seed, split, group, index) for index in range(count)]
        greedy_baseline = split == "train" and self._greedy_baseline
        request = GroupRequest(split, row, group, seeds, self._sampling[split], greedy_baseline)
        if self._finished[split] == self._started[split]:
            self._started[split] = self._finished[split] = 0
            self._began[split] = time.monotonic()
        self._started[split] += count
        handles = await self._supervisor.run_while_available(self._pool.run(request))
        self._finished[split] += count
        return handles


def _sampling_params(config: Config, stop_token_ids: tuple[int, ...]) -> dict[str, SamplingParams]:
    train, val = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    val_temperature = 0.0 if val.do_sample is False else val.temperature
    return {
        split: SamplingParams(
            config.data.max_response_length,
            temperature,
            each.top_p,
            each.top_k,
            stop_token_ids,
            keep_sampling_mask=split == "train" and train.keep_sampling_mask,
        )
        for split, each, temperature in (("train", train, train.temperature), ("val", val, val_temperature))
    }
