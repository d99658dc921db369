"""Settings -> objects. The only place that knows all of them; what can start side by side does."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from verl.checkpoint.manifest import CheckpointDir
from verl.cluster.device_pool import PlacementPool
from verl.cluster.hangs.pending_calls import MARGIN_S
from verl.config.batch_sizes import count_engines, count_total_steps, count_train_ranks, get_max_sequence_tokens
from verl.config.features import uses_reward_function
from verl.config.schema.base import Section
from verl.config.schema.root import Config
from verl.config.validation import find_hints
from verl.data.stream import PromptStream
from verl.rewards.failures import FailureTracker
from verl.rewards.pool.pool import open_rewards
from verl.rewards.resolve import resolve_scorer
from verl.rewards.result import truncate
from verl.rollout.supervisor import EngineSupervisor
from verl.tracking.console import Console
from verl.tracking.metrics import Metrics, timer
from verl.trainer.buffer import EpisodeBuffer, differs
from verl.trainer.checkpointing import Checkpointer
from verl.trainer.evaluator import Evaluator
from verl.trainer.restarts import RestartTracker
from verl.trainer.rl_trainer import LoopSchedule, RLTrainer
from verl.trainer.run_data import RunData, check_files, read_data
from verl.trainer.setup import (
    WithRunInfo,
    device_hints,
    open_tracker,
    resolve_path,
    resume,
    start_runtime,
    with_changes,
)
from verl.trainer.worker_settings import (
    algorithm_settings,
    build_planner,
    compute_dtype,
    deadlines,
    engine_settings,
    episode_settings,
    reward_model_settings,
    reward_pool_settings,
    rollout_dtype,
    train_settings,
    transport_name,
)
from verl.types import SampleHandle, SamplingParams
from verl.weights.probe import TOLERANCES, Probe
from verl.weights.sync import DeviceTransport, HostTransport, Transport, WeightSync
from verl.workers.episodes import EpisodePool, GroupRequest
from verl.workers.rewards import RemoteRewardModel
from verl.workers.rollout import RemoteEngine
from verl.workers.train import PolicyGroup

__all__ = ["build_trainer", "place_engines"]

PROBE_LENGTH = 24
RANKS_PER_EPISODE_WORKER = 8

T = TypeVar("T")
S = TypeVar("S", bound=Section)
Answer = Callable[[str, int, int, int], Awaitable[list[SampleHandle] | None]]
"""(split, row, group, how many answers) -> samples; None for a row that is left out."""
Reward = Callable[..., Any]
Preview = Callable[..., Awaitable[str]]
"""(split, data source or None) -> one of the latest answers, and what it got, in words."""


@asynccontextmanager
async def build_trainer(
    config: Config,
    console: Console,
    *,
    restarts: RestartTracker | None = None,
    reward: Reward | None = None,
    model_ready: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[RLTrainer]:
    """A trainer whose processes are up, resumed if there is something to resume; leaving ends the processes.

    `restarts` counts those of the run so far. `reward` is a function to use instead of the configured one.
    `model_ready` is awaited before the weights are read, so that engines start while the model is still being made.
    """
    times, restarts = Metrics(), restarts or RestartTracker(console)

    async def timed(name: str, part: Awaitable[T]) -> T:
        with timer(times, f"start_{name}"):
            return await part

    config = _absolute(config)
    check_files(config)  # what can be seen to be wrong at once is said before anything is started
    with timer(times, "start_reward_check"):
        await _check_reward(config, reward)
    async with AsyncExitStack() as closing:
        site = await closing.enter_async_context(start_runtime(config, console, restarts, times))
        config, pool, device, limits = site.config, site.pool, site.device, deadlines(config)
        ranks = count_train_ranks(config)
        engines = place_engines(config, pool, device)
        closing.push_async_callback(_close_all, engines)
        engines_up = asyncio.create_task(timed("engines", _all(engine.start() for engine in engines)))
        closing.callback(engines_up.cancel)
        reward_models = _place_reward_models(config, pool, device)
        closing.push_async_callback(_close_all, reward_models)
        models_up = asyncio.create_task(timed("reward_models", _all(model.start() for model in reward_models)))
        closing.callback(models_up.cancel)
        policy = PolicyGroup.spawn(pool, ranks, share=0.5, deadlines=limits)
        closing.callback(policy.close)

        data = await timed("data", _data(config))
        for report in data.reports:
            console.note(report)
        schedule = _schedule(config, data)
        models = train_settings(config, schedule.total_steps, device)
        for note in (_outlook(config, schedule, data), *device_hints(config, device, find_hints)):
            console.note(note)
        count = max(1, ranks // RANKS_PER_EPISODE_WORKER)
        deterministic = config.trainer.deterministic
        episodes = EpisodePool.spawn(
            pool,
            count,
            episode_settings(config, data, count, reward),
            engines,
            reward_models,
            deterministic=deterministic,
        )
        closing.callback(episodes.close)

        async def start_policy() -> None:
            if model_ready is not None:
                await timed("model", model_ready())
            for note in await timed("train_workers", policy.start(models)):
                console.note(note)

        await asyncio.gather(engines_up, models_up, start_policy(), timed("episode_workers", episodes.start()))
        stream = PromptStream(data.order)
        version = await resume(config, policy, stream, console)
        restarts.resumed(version)
        tracker = open_tracker(config, console, schedule, version)
        closing.callback(tracker.close)
        tracker.log(times, version)
        supervisor = EngineSupervisor(
            engines,
            restarts.engine,
            reply_timeout_s=limits.reply.seconds + MARGIN_S,
            start_timeout_s=limits.start.seconds + MARGIN_S,
            max_restarts=restarts.settings.max_engine_restarts,
        )
        answer, preview = _answering(config, data, episodes, supervisor), _previewing(config, episodes)
        dynamic = config.algorithm.filter_groups
        answers_a_prompt = config.actor_rollout_ref.rollout.n
        tally = FailureTracker(config.reward.max_failure_rate, schedule.batch * answers_a_prompt, console.advice)

        async def run_group(position: int, row: int) -> list[SampleHandle] | None:
            handles = await answer("train", row, position, answers_a_prompt)
            return None if handles is None else tally.keep_scored(handles)

        buffer = EpisodeBuffer(
            run_group,
            stream,
            schedule.batch,
            max_staleness=config.trainer.max_staleness,
            has_signal=differs(dynamic.metric) if dynamic.enable else None,
            max_batches=dynamic.max_num_gen_batches if dynamic.enable else 0,
            say=console.advice,
        )
        closing.push_async_callback(buffer.close)
        weights = WeightSync(policy, engines, _transport(config), _probe(config, data, device), supervisor)
        supervisor.start(weights.sync_one)
        closing.push_async_callback(supervisor.close)
        yield RLTrainer(
            buffer=buffer,
            planner=build_planner(config, ranks),
            policy=policy,
            weights=weights,
            evaluator=_evaluator(config, data, answer, preview),
            checkpointer=Checkpointer(
                WithRunInfo(policy, config),
                CheckpointDir(config.trainer.checkpoint_dir),
                console,
                keep=config.trainer.max_ckpts_to_keep,
                deadline=limits.checkpoint,
            ),
            schedule=schedule,
            tracker=tracker,
            console=console,
            version=version,
            tally=tally,
            preview=preview,
            restarts=restarts,
        )


async def _check_reward(config: Config, reward: Reward | None = None) -> None:
    """Load the reward function once, in a process of its own: whatever its import does, it does not do it here."""
    if not uses_reward_function(config):
        return
    settings = reward_pool_settings(config, function=reward)
    with open_rewards(replace(settings, workers=min(1, settings.workers))) as pool:
        await pool.start()


async def _data(config: Config) -> RunData:
    """Read beside the start of others; where these are in this process too, imports would get into each other's way."""
    return read_data(config) if config.trainer.local else await asyncio.to_thread(read_data, config)


async def _all(parts: Iterable[Awaitable[Any]]) -> None:
    await asyncio.gather(*parts)


async def _close_all(engines: Sequence[RemoteEngine | RemoteRewardModel]) -> None:
    await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)


def _absolute(config: Config) -> Config:
    """Local paths in full, wherever the workers are started."""

    def all_full(paths: str | list[str] | None) -> str | list[str] | None:
        return [resolve_path(path) for path in paths] if isinstance(paths, list) else paths and resolve_path(paths)

    data = {name: all_full(getattr(config.data, name)) for name in ("train_files", "val_files")}
    model, reward = config.actor_rollout_ref.model, config.reward
    return with_changes(
        config,
        {
            "data": data,
            "actor_rollout_ref": {
                "model": {"path": resolve_path(model.path), "tokenizer_path": all_full(model.tokenizer_path)}
            },
            "critic": {"model": {"path": all_full(config.critic.model.path)}},
            "reward": {
                "custom_reward_function": {"path": all_full(reward.custom_reward_function.path)},
                "prime": {"model_path": all_full(reward.prime.model_path)},
                "reward_model": {"model_path": all_full(reward.reward_model.model_path)},
            },
            "trainer": {"default_local_dir": str(config.trainer.checkpoint_dir.absolute())},
        },
    )


def _outlook(config: Config, schedule: LoopSchedule, data: RunData) -> str:
    epochs = schedule.total_steps * schedule.batch / data.order.length
    return f"{schedule.total_steps:,} steps of {schedule.batch:,} prompts: {epochs:.3g} epochs"


def place_engines(config: Config, pool: PlacementPool, device: str, **changes: Any) -> list[RemoteEngine]:
    """The rollout engines, spread over the devices, not yet started; `changes` of what they are told."""
    rollout = config.actor_rollout_ref.rollout
    width = rollout.tensor_model_parallel_size
    count = count_engines(config)
    return [
        RemoteEngine.spawn(
            pool,
            number,
            device=number * width % pool.count,
            share=_engines_share(config) / -(-count * width // pool.count),
            name=rollout.name,
            settings=engine_settings(config, device, number) | changes,
            deadlines=deadlines(config),
        )
        for number in range(count)
    ]


def _place_reward_models(config: Config, pool: PlacementPool, device: str) -> list[RemoteRewardModel]:
    """Beside engines and train workers, from the last device down."""
    model = config.reward.reward_model
    if not model.enable:
        return []
    share = (0.5 - _engines_share(config)) / -(-model.replicas // pool.count)
    return [
        RemoteRewardModel.spawn(
            pool,
            number,
            device=pool.count - 1 - number % pool.count,
            share=share,
            settings=reward_model_settings(config, device, number),
            deadlines=deadlines(config),
        )
        for number in range(model.replicas)
    ]


def _engines_share(config: Config) -> float:
    """Of a device, as Ray counts it; half of it is the train worker's."""
    return 0.25 if config.reward.reward_model.enable else 0.5


def _schedule(config: Config, data: RunData) -> LoopSchedule:
    batch = config.data.train_batch_size
    return LoopSchedule(
        batch=batch,
        total_steps=count_total_steps(config, data.order.length),
        save_every=config.trainer.save_freq,
        validate_every=config.trainer.test_freq,
        validate_first=config.trainer.val_before_train,
    )


def _answering(config: Config, data: RunData, episodes: EpisodePool, supervisor: EngineSupervisor) -> Answer:
    rollout, validation = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    common: dict[str, Any] = {
        "max_tokens": config.data.max_response_length,
        "stop_token_ids": data.stop_token_ids,
    }
    greedy = validation.do_sample is False
    sampling = {
        "train": SamplingParams(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, **common),
        "val": SamplingParams(
            temperature=0.0 if greedy else validation.temperature,
            top_p=validation.top_p,
            top_k=validation.top_k,
            **common,
        ),
    }

    def seed(split: str, group: int, number: int) -> int | None:
        if not config.trainer.deterministic:
            return None
        text = f"{config.trainer.seed}/{split}/{group}/{number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")

    async def answer(split: str, row: int, group: int, count: int) -> list[SampleHandle] | None:
        seeds = [seed(split, group, number) for number in range(count)]
        greedy_baseline = split == "train" and algorithm_settings(config).estimator == "remax"
        return await supervisor.run_while_available(
            episodes.run(GroupRequest(split, row, group, seeds, sampling[split], greedy_baseline))
        )

    return answer


def _evaluator(config: Config, data: RunData, answer: Answer, preview: Preview) -> Evaluator | None:
    if not data.has_validation:
        return None
    count = config.actor_rollout_ref.rollout.val_kwargs.n

    async def validate(row: int) -> list[SampleHandle]:
        handles = await answer("val", row, row, count)
        assert handles is not None, "the rows of validation were all measured before the start"
        return handles

    return Evaluator(
        validate, data.val_sources, batch=config.data.val_batch_size, preview=lambda source: preview("val", source)
    )


def _previewing(config: Config, episodes: EpisodePool) -> Preview:
    async def preview(split: str, data_source: str | None = None) -> str:
        found = await episodes.preview_sample(split, data_source)
        if found is None:
            return ""
        scorer, answer, truth = (
            resolve_scorer(config, found.data_source),
            truncate(found.response),
            truncate(found.ground_truth),
        )
        return f"{scorer} gave {found.score:g} to the answer {answer}; the ground truth is {truth}"

    return preview


def _probe(config: Config, data: RunData, device: str) -> Probe:
    rollout = config.actor_rollout_ref.rollout
    coarser = max(rollout_dtype(config, device), compute_dtype(config, device), key=TOLERANCES.__getitem__)
    return Probe.random(
        data.vocabulary,
        tolerance=rollout.probe_tolerance or TOLERANCES[coarser],
        length=min(PROBE_LENGTH, get_max_sequence_tokens(config) - 1),
    )


def _transport(config: Config) -> Transport:
    name = transport_name(config)
    return HostTransport() if name == "host" else DeviceTransport(name)
