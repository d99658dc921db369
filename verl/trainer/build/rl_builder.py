"""Builds an RL run from its settings: one method per stage, in the order of `RLBuilder.build`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from verl.cluster.device_pool import DevicePool, PlacementPool
from verl.cluster.hangs.pending_calls import MARGIN_S
from verl.cluster.nodes import read_gpu_records
from verl.config.batch_sizes import (
    count_engine_devices,
    count_episode_workers,
    count_lent_engines,
    count_rollout_devices,
    count_total_steps,
    count_validation_prompts,
    get_max_sequence_tokens,
    get_run_ahead,
)
from verl.config.checks import TRAIN_HINTS
from verl.config.features import frees_engine_memory, transport_name
from verl.config.schema.conditions import DYNAMIC
from verl.config.schema.root import Config
from verl.data.samplers import PromptStream
from verl.errors import ConfigError
from verl.memory_plan.accelerators import find_device
from verl.models.model_folder import require_config
from verl.models.model_shape import ModelShape
from verl.rewards.result import FailureTracker
from verl.rollout.engine_metrics import read_engine_metrics
from verl.rollout.scaling import EngineScaler, read_status
from verl.rollout.supervisor import EngineSupervisor
from verl.tracking.console import Console
from verl.tracking.metrics import timer
from verl.tracking.throughput import Throughput
from verl.trainer.buffer.episode_buffer import EpisodeBuffer
from verl.trainer.build.algorithm_settings import algorithm_settings
from verl.trainer.build.data import RunData, read_data
from verl.trainer.build.placement import EnginePlacer, place_reward_models
from verl.trainer.build.preflight import check_determinism, check_engine_layout, memory_notes
from verl.trainer.build.runtime import RunBuilder, device_hints
from verl.trainer.build.weight_transport import KEY as WEIGHT_TRANSPORT
from verl.trainer.build.weight_transport import choose_transport
from verl.trainer.build.worker_settings import (
    build_planner,
    coarsest_dtype,
    episode_settings,
    timeouts,
    train_settings,
)
from verl.trainer.evaluator import Evaluator
from verl.trainer.records.replay import StepRecorder
from verl.trainer.records.samples import RecordSettings, SampleRecorder
from verl.trainer.records.step import StepRecords
from verl.trainer.restarts import RestartTracker
from verl.trainer.rl_trainer import RLTrainer
from verl.trainer.train_loop import LoopSchedule, TrainLoop
from verl.weights.probe import TOLERANCES, Probe
from verl.weights.sync import DeviceTransport, HostTransport, WeightSync
from verl.workers.episode_pool import EpisodeClient, EpisodePool
from verl.workers.rewards import RemoteRewardModel
from verl.workers.rollout import RemoteEngine
from verl.workers.train import PolicyGroup

PROBE_LENGTH = 32
_STAGES = {
    "engines": "starting the rollout engines",
    "reward_models": "starting the reward models",
    "train_workers": "starting the train workers",
    "episode_workers": "starting the episode workers",
}

T = TypeVar("T")


@asynccontextmanager
async def build_trainer(
    config: Config,
    console: Console,
    *,
    restarts: RestartTracker | None = None,
    reward: Callable[..., Any] | None = None,
    model_ready: Callable[[], Awaitable[None]] | None = None,
    origins: Mapping[str, str] | None = None,
) -> AsyncIterator[TrainLoop[RLTrainer]]:
    """Start the processes of a run and resume it if it has a checkpoint; on exit, end the processes.

    `restarts` counts those of the run so far. `reward` is a function to use instead of the configured one.
    `model_ready` is awaited before the weights are read, so that engines start while the model is still being made.
    `origins` say where the given settings come from.
    """
    async with AsyncExitStack() as closing:
        builder = RLBuilder(config, console, restarts or RestartTracker(console), closing, origins)
        yield await builder.build(reward, model_ready)


class RLBuilder(RunBuilder[Config]):
    """The stages of building a run. Engines and reward models start in the background while the data is read."""

    paths = (
        "data.train_files",
        "data.val_files",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.model.tokenizer_path",
        "actor_rollout_ref.model.lora_adapter_path",
        "actor_rollout_ref.rollout.python",
        "critic.model.path",
        "reward.custom_reward_function.path",
        "reward.prime.model_path",
        "reward.reward_model.model_path",
        "distillation.teacher.path",
    )

    async def build(
        self,
        reward: Callable[..., Any] | None = None,
        model_ready: Callable[[], Awaitable[None]] | None = None,
    ) -> TrainLoop[RLTrainer]:
        await self.start_runtime()
        if self.config.actor_rollout_ref.actor.use_dynamic_bsz is None:
            self.resolve(DYNAMIC, self.device != "cpu")
        check_determinism(self.config, self.device)
        check_engine_layout(self.config, self.device)
        self.note(memory_notes(self.config, self.device))
        policy = await self.spawn_train_workers(PolicyGroup)
        devices = [] if self.device == "cpu" else await policy.visible_devices()
        own_devices = None if self.config.actor_rollout_ref.hybrid_engine else await self.reserve_rollout_devices()
        await self.resolve_transport([self.pool] if own_devices is None else [self.pool, own_devices])
        if own_devices is None:
            placer = EnginePlacer(self.config, self.pool, self.device, devices)
        else:
            placer = EnginePlacer(self.config, own_devices, self.device)
        self._closing.callback(placer.close)
        engines = placer.spawn_first()
        shares_devices: bool | range = frees_engine_memory(self.config, self.device)
        if count_lent_engines(self.config):
            lent = EnginePlacer(self.config, self.pool, self.device, devices, first_id=len(engines)).spawn_first()
            shares_devices = range(len(engines), len(engines) + len(lent))
            engines += lent
        supervisor = build_supervisor(self.config, engines, self.restarts, shares_devices=shares_devices)
        reward_models = place_reward_models(self.config, self.pool, self.device, devices)
        starting = self.start_engines(supervisor, reward_models)
        data = await self.load_data()
        schedule = self.build_schedule(data)
        settings = train_settings(self.config, schedule.total_steps, self.device)
        settings = replace(settings, is_one_machine=self.pool.is_one_machine())
        episode_pool = self.spawn_episode_workers(data, supervisor, reward_models, reward)

        async def start_train_workers() -> None:
            if model_ready is not None:
                with timer(self.times, "start_model"):
                    await model_ready()
            if self.device != "cpu":
                await asyncio.gather(*starting)  # vLLM measures free memory while it starts
            self.note(await self._timed("train_workers", lambda: policy.start(settings)))

        start_episode_workers = self._timed("episode_workers", episode_pool.start)
        await asyncio.gather(*starting, start_train_workers(), start_episode_workers)
        stream = PromptStream(data.order)
        version = await self.resume(policy, stream, schedule, lambda: read_engine_metrics(supervisor.view.engines))
        episodes = self.build_episode_client(data, episode_pool, supervisor)
        trainer = RLTrainer(
            self.build_buffer(episodes, stream, schedule.total_steps - version),
            build_planner(self.config, policy.layout.data_size),
            policy,
            self.build_weight_sync(policy, data, supervisor, placer),
            episodes,
            self.build_evaluator(episodes, data),
            self.console,
            await self.build_throughput(policy),
            StepRecords(
                self.open_record("trained", version),
                self.open_record("phases", version),
                self.build_sample_recorder(episode_pool),
                self.build_step_recorder(policy),
            ),
            saves_at=schedule.saves_at,
        )
        keep_weights = trainer.weights.keep_version if self.config.trainer.max_staleness > 0 else None
        return self.build_loop(trainer, policy, schedule, version, keep_weights)

    async def build_throughput(self, policy: PolicyGroup) -> Throughput:
        devices, config = self.pool.count, self.config
        has_own_engines = not config.actor_rollout_ref.hybrid_engine
        may_overlap = has_own_engines or not frees_engine_memory(config, self.device)
        throughput = Throughput(
            devices,
            count_rollout_devices(config) + count_lent_engines(config) * count_engine_devices(config),
            config.actor_rollout_ref.actor.ppo_epochs,
            is_asynchronous=config.trainer.max_staleness > 0 and may_overlap,
            has_own_engines=has_own_engines,
        )
        device = None if self.device == "cpu" else find_device(await policy.device_name())
        if device is None:
            return throughput
        try:
            shape = ModelShape.from_config(require_config(config.actor_rollout_ref.model.path))
        except ConfigError:  # not a decoder-only model
            return throughput
        return replace(throughput, shape=shape, peak=device.flops)

    async def reserve_rollout_devices(self) -> DevicePool:
        """Reserve the devices of engines that do not share those of the train workers."""
        width = count_engine_devices(self.config)
        return await self.reserve_devices(
            count_rollout_devices(self.config), width, "actor_rollout_ref.rollout.n_gpus_per_node"
        )

    async def resolve_transport(self, pools: Sequence[PlacementPool]) -> None:
        """Choose how weights go to the engines on accelerators, where the settings leave it open."""
        if self.device == "cpu" or self.config.actor_rollout_ref.rollout.weight_transport != "auto":
            return
        nodes = {node for pool in pools if isinstance(pool, DevicePool) for node in pool.list_nodes()}
        choose = partial(choose_transport, self.config, self.device, partial(read_gpu_records, nodes))
        transport, line = await asyncio.to_thread(choose)
        self.resolve(WEIGHT_TRANSPORT, transport)
        self.note([line])

    async def load_data(self) -> RunData:
        """Read the data in a thread, unless the workers run in this process too: their imports would collide."""
        with timer(self.times, "start_data"), self.console.stage("reading the data"):
            is_local = self.config.trainer.local
            data = read_data(self.config) if is_local else await asyncio.to_thread(read_data, self.config)
        self.note(data.reports)
        return data

    def build_schedule(self, data: RunData) -> LoopSchedule:
        trainer, batch = self.config.trainer, self.config.data.train_batch_size
        steps = count_total_steps(self.config, data.order.length)
        epochs, n = steps * batch / data.order.length, self.config.actor_rollout_ref.rollout.n
        longest = self.config.data.max_response_length
        size = f"{batch * n:,} responses of up to {longest:,} tokens in each"
        self.note([f"{steps:,} steps of {batch:,} prompts: {epochs:.3g} epochs; {size}"])
        self.note(device_hints(self.given, self.device, TRAIN_HINTS))
        validates_first = trainer.val_before_train or trainer.val_only
        return LoopSchedule(
            batch, steps, trainer.save_freq, trainer.test_freq, validates_first, trains=not trainer.val_only
        )

    def spawn_episode_workers(
        self,
        data: RunData,
        supervisor: EngineSupervisor,
        reward_models: Sequence[RemoteRewardModel],
        reward: Callable[..., Any] | None,
    ) -> EpisodePool:
        count = count_episode_workers(self.config, os.cpu_count() or 1)
        settings = episode_settings(self.config, data.datasets, count, reward)
        pool = EpisodePool.spawn(
            self.pool, count, settings, supervisor.view, reward_models, deterministic=self.config.trainer.deterministic
        )
        supervisor.follow(pool.update_engines)
        self._closing.callback(pool.close)
        return pool

    def build_episode_client(self, data: RunData, pool: EpisodePool, supervisor: EngineSupervisor) -> EpisodeClient:
        samples = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        failures = FailureTracker(self.config.reward.max_failure_rate, samples, self.console.advice)
        greedy_baseline = algorithm_settings(self.config).estimator == "remax"
        return EpisodeClient(
            self.config, pool, supervisor, failures, data.stop_token_ids, greedy_baseline=greedy_baseline
        )

    def build_buffer(self, episodes: EpisodeClient, stream: PromptStream, steps: int) -> EpisodeBuffer:
        dynamic = self.config.algorithm.filter_groups
        buffer = EpisodeBuffer(
            episodes.run_group,
            stream,
            self.config.data.train_batch_size,
            max_staleness=self.config.trainer.max_staleness,
            run_ahead=get_run_ahead(self.config),
            steps=steps,
            signal=dynamic if dynamic.enable else None,
            warn=self.console.advice,
        )
        self._closing.push_async_callback(buffer.close)
        return buffer

    def build_weight_sync(
        self, policy: PolicyGroup, data: RunData, supervisor: EngineSupervisor, placer: EnginePlacer
    ) -> WeightSync:
        """Connect train workers and engines; from here on, engines may join, leave, and be restarted when lost."""
        name = transport_name(self.config)
        transport = HostTransport() if name == "host" else DeviceTransport(name)
        weights = WeightSync(policy, supervisor, transport, self._build_probe(data))
        supervisor.start(weights.sync_one)
        self._closing.push_async_callback(supervisor.close)
        folder = self.config.trainer.checkpoint_dir
        before = (read_status(folder) if self.restarts.has_restarted else None) or {}
        scaler = EngineScaler(supervisor, placer, folder, self.console.note, wanted=before.get("wanted"))
        scaler.start()
        self._closing.push_async_callback(scaler.close)
        return weights

    def build_sample_recorder(self, pool: EpisodePool) -> SampleRecorder:
        recorder = SampleRecorder(
            RecordSettings.from_config(self.config), pool.write_samples, self.console, self.tracker
        )
        self._closing.push_async_callback(recorder.close)
        return recorder

    def build_step_recorder(self, policy: PolicyGroup) -> StepRecorder | None:
        trainer = self.config.trainer
        return (
            StepRecorder(trainer.checkpoint_dir, trainer.replay.steps, policy, self.console)
            if trainer.replay.steps
            else None
        )

    def build_evaluator(self, episodes: EpisodeClient, data: RunData) -> Evaluator | None:
        if not data.val_sources:
            return None
        return Evaluator(
            episodes.run_validation,
            data.val_sources,
            batch=count_validation_prompts(self.config),
            preview=partial(episodes.preview, "val"),
        )

    def _build_probe(self, data: RunData) -> Probe:
        dtype, given = coarsest_dtype(self.config, self.device), self.config.actor_rollout_ref.rollout.probe_tolerance
        return Probe.random(
            data.vocabulary,
            tolerance=given or TOLERANCES[dtype],
            dtype=dtype if given is None else None,
            length=min(PROBE_LENGTH, get_max_sequence_tokens(self.config) - 1),
        )

    def start_engines(
        self, supervisor: EngineSupervisor, reward_models: Sequence[RemoteRewardModel]
    ) -> list[asyncio.Task[None]]:
        """Start both in the background; on accelerators one after the other, then engines sleep if they are to."""

        async def start_rollout() -> None:
            await asyncio.gather(*(engine.start() for engine in supervisor.engines))
            await asyncio.gather(*(engine.sleep() for engine in supervisor.engines_of_trainer))

        async def start_rewards() -> None:
            if self.device != "cpu":
                await rollout
            await asyncio.gather(*(model.start() for model in reward_models))

        async def close() -> None:
            actors = (*supervisor.engines, *reward_models)
            await asyncio.gather(*(actor.close() for actor in actors), return_exceptions=True)

        self._closing.push_async_callback(close)
        rollout = asyncio.create_task(self._timed("engines", start_rollout))
        rewards = asyncio.create_task(self._timed("reward_models", start_rewards))
        for task in (rollout, rewards):
            self._closing.callback(task.cancel)
        return [rollout, rewards]

    async def _timed(self, name: str, stage: Callable[[], Awaitable[T]]) -> T:
        is_logged = name in ("engines", "train_workers")
        with timer(self.times, f"start_{name}"), self.console.stage(_STAGES[name], is_logged=is_logged):
            return await stage()


def build_supervisor(
    config: Config,
    engines: Sequence[RemoteEngine],
    restarts: RestartTracker,
    *,
    shares_devices: bool | Collection[int] = False,
) -> EngineSupervisor:
    limits = timeouts(config)
    return EngineSupervisor(
        engines,
        restarts.engine,
        reply_timeout_s=limits.reply.seconds + MARGIN_S,
        start_timeout_s=limits.start.seconds + MARGIN_S,
        max_restarts=config.trainer.faults.max_engine_restarts,
        shares_devices=shares_devices,
    )
