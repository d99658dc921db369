"""Settings -> objects. The only place that knows all of them; what can start side by side does."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from verl.checkpoint.manifest import CheckpointDir
from verl.cluster.pool import DevicePool
from verl.cluster.session import connect, detect_device, disconnect
from verl.config.schema.base import Section
from verl.config.schema.root import Config
from verl.config.sizes import engine_count, max_sequence_tokens, optimiser_steps, total_steps, train_ranks
from verl.data.plan import Planner
from verl.data.stream import PromptStream
from verl.errors import CheckpointError, ConfigError
from verl.rewards.score import load_reward
from verl.tracking.console import Console
from verl.tracking.metrics import Metrics, timer
from verl.tracking.sinks import Run, Sink, open_sinks
from verl.trainer.buffer import EpisodeBuffer
from verl.trainer.data import RunData, check_files, read_data
from verl.trainer.evaluate import Evaluator
from verl.trainer.loop import Timetable, Trainer
from verl.training.schedule import Schedule
from verl.training.settings import FsdpSettings
from verl.types import SampleHandle, SamplingParams
from verl.weights.probe import TOLERANCES, Probe
from verl.weights.publish import DeviceTransport, HostTransport, Publisher, Transport
from verl.workers.episodes import EpisodePool, EpisodeSettings
from verl.workers.rollout import RemoteEngine
from verl.workers.train import PolicyGroup, TrainSettings

__all__ = ["assemble"]

PROBE_LENGTH = 24
RANKS_PER_EPISODE_WORKER = 8

T = TypeVar("T")
S = TypeVar("S", bound=Section)
Answer = Callable[[str, int, int, int], Awaitable[list[SampleHandle]]]
"""(split, row, group, how many answers) -> samples."""


@asynccontextmanager
async def assemble(
    config: Config, console: Console, *, model_ready: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[Trainer]:
    """A trainer whose processes are up, resumed if there is something to resume; leaving ends the processes.

    `model_ready` is awaited before the weights are read, so that engines can start while somebody still makes them.
    """
    times = Metrics()

    async def timed(name: str, part: Awaitable[T]) -> T:
        with timer(times, f"start_{name}"):
            return await part

    config = _absolute(config)
    check_files(config)  # what can be seen to be wrong at once is said before anything is started
    reward = load_reward(**_reward(config))
    async with AsyncExitStack() as closing:
        closing.callback(disconnect)
        with timer(times, "start_ray"):
            connect(config.ray_kwargs.ray_init.arguments())
        device = detect_device() if config.trainer.device == "auto" else config.trainer.device
        ranks = train_ranks(config)
        pool = DevicePool(ranks, device, mend=f"set trainer.n_gpus_per_node to what a machine has: {_owned(device)}")
        closing.callback(pool.close)
        engines = _place_engines(config, pool, device)
        closing.push_async_callback(_close_all, engines)
        engines_up = asyncio.create_task(timed("engines", _all(engine.start() for engine in engines)))
        closing.callback(engines_up.cancel)
        policy = PolicyGroup.place(pool, ranks, share=0.5)
        closing.callback(policy.close)

        data = await timed("data", asyncio.to_thread(read_data, config, reward))
        for report in data.reports:
            console.note(report)
        timetable = _timetable(config, data)
        train_settings = _train_settings(config, timetable, device)
        console.note(_outlook(config, timetable, data))
        episodes = EpisodePool.place(
            max(1, ranks // RANKS_PER_EPISODE_WORKER), _episode_settings(config, data), engines
        )
        closing.callback(episodes.close)

        async def start_policy() -> None:
            if model_ready is not None:
                await timed("model", model_ready())
            await timed("train_workers", policy.start(train_settings))

        await asyncio.gather(engines_up, start_policy(), timed("episode_workers", episodes.start()))
        stream = _stream(config, data)
        version = await _resume(config, policy, stream, console)
        tracker = _open_tracker(config, console, timetable, version)
        closing.callback(tracker.close)
        tracker.log(times, version)
        answer = _answering(config, data, episodes)
        buffer = EpisodeBuffer(
            lambda position, row: answer("train", row, position, config.actor_rollout_ref.rollout.n),
            stream,
            timetable.batch,
            max_staleness=config.trainer.max_staleness,
        )
        closing.push_async_callback(buffer.close)
        yield Trainer(
            buffer=buffer,
            planner=_planner(config, ranks),
            policy=policy,
            weights=Publisher(policy, engines, _transport(config), _probe(config, data, device)),
            evaluator=_evaluator(config, data, answer),
            checkpoints=CheckpointDir(config.trainer.checkpoint_dir),
            timetable=timetable,
            tracker=tracker,
            console=console,
            version=version,
        )


async def _all(parts: Iterable[Awaitable[Any]]) -> None:
    await asyncio.gather(*parts)


async def _close_all(engines: list[RemoteEngine]) -> None:
    await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)


def _open_tracker(config: Config, console: Console, timetable: Timetable, version: int) -> Sink:
    console.total_steps = timetable.total_steps
    run = Run(
        folder=config.trainer.checkpoint_dir,
        project=config.trainer.project_name,
        name=config.trainer.experiment_name,
        total_steps=timetable.total_steps,
        settings=config.model_dump(mode="json"),
        resumed_step=version or None,
    )
    return open_sinks([*config.trainer.logger, "jsonl"], run, console)


def _absolute(config: Config) -> Config:
    """Local paths in full: workers on a cluster that was started elsewhere have another working directory."""

    def full(path: str) -> str:
        found = Path(path).expanduser()
        return str(found.absolute()) if found.exists() else path

    def all_full(paths: str | list[str] | None) -> str | list[str] | None:
        return [full(path) for path in paths] if isinstance(paths, list) else paths and full(paths)

    data = {name: all_full(getattr(config.data, name)) for name in ("train_files", "val_files")}
    model = config.actor_rollout_ref.model
    function = config.reward.custom_reward_function
    return _changed(
        config,
        {
            "data": data,
            "actor_rollout_ref": {"model": {"path": full(model.path)}},
            "reward": {"custom_reward_function": {"path": all_full(function.path)}},
            "trainer": {"default_local_dir": str(config.trainer.checkpoint_dir.absolute())},
        },
    )


def _changed(section: S, changes: Mapping[str, Any]) -> S:
    """A copy of frozen settings with some replaced, section by section."""
    update = {
        name: _changed(getattr(section, name), value) if isinstance(value, Mapping) else value
        for name, value in changes.items()
    }
    return section.model_copy(update=update)


def _stream(config: Config, data: RunData) -> PromptStream:
    seed = config.trainer.seed if config.data.seed is None else config.data.seed
    return PromptStream(data.train_rows, shuffle=config.data.shuffle, seed=seed)


def _outlook(config: Config, timetable: Timetable, data: RunData) -> str:
    epochs = timetable.total_steps * timetable.batch / data.train_rows
    return f"{timetable.total_steps:,} steps of {timetable.batch:,} prompts: {epochs:.3g} epochs"


def _episode_settings(config: Config, data: RunData) -> EpisodeSettings:
    model = config.actor_rollout_ref.model
    return EpisodeSettings(model.tokenizer_path or model.path, data.datasets, _reward(config), model.trust_remote_code)


def _place_engines(config: Config, pool: DevicePool, device: str) -> list[RemoteEngine]:
    rollout = config.actor_rollout_ref.rollout
    width = rollout.tensor_model_parallel_size
    count = engine_count(config)
    return [
        RemoteEngine.place(
            pool,
            number,
            device=number * width % pool.count,
            share=0.5 / -(-count * width // pool.count),
            name=rollout.name,
            settings=_engine_settings(config, device, number),
        )
        for number in range(count)
    ]


def _engine_settings(config: Config, device: str, number: int) -> dict[str, Any]:
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    dtype = _rollout_dtype(config, device)
    if rollout.name == "hf":
        return {"model_path": model.path, "dtype": dtype, "device": device, "trust": model.trust_remote_code}
    return {
        "model_path": model.path,
        "dtype": dtype,
        "load_format": rollout.load_format,
        "max_model_len": max_sequence_tokens(config),
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "tensor_parallel": rollout.tensor_model_parallel_size,
        "memory_fraction": rollout.gpu_memory_utilization,
        "enforce_eager": rollout.enforce_eager,
        "trust_remote_code": model.trust_remote_code,
        "weight_backend": _transport_name(config),
        "seed": config.trainer.seed + number,
        "device": device,
        "cpu_cache_gib": rollout.cpu_cache_gib,
        "cpu_cores": str(number % (os.cpu_count() or 1)) if device == "cpu" else "",
        "kwargs": rollout.engine_kwargs.vllm,
    }


def _train_settings(config: Config, timetable: Timetable, device: str) -> TrainSettings:
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    updates = optimiser_steps(config, timetable.total_steps)
    warmup = actor.optim.lr_warmup_steps
    warmup = round(actor.optim.lr_warmup_steps_ratio * updates) if warmup is None else warmup
    kind = actor.optim.lr_scheduler_type
    try:
        Schedule(actor.optim.lr, kind, warmup, updates, actor.optim.min_lr_ratio)
    except ValueError as error:  # only now is it known how many steps the data gives
        raise ConfigError([f"actor_rollout_ref.actor.optim: {error}"]) from error
    common: dict[str, Any] = {
        "model_path": model.path,
        "param_dtype": actor.fsdp_config.model_dtype,
        "compute_dtype": _compute_dtype(config, device),
        "temperature": config.actor_rollout_ref.rollout.temperature,
        "device": device,
        "trust_remote_code": model.trust_remote_code,
    }
    trained = FsdpSettings(
        **common,
        lr=actor.optim.lr,
        betas=actor.optim.betas,
        eps=actor.optim.eps,
        weight_decay=actor.optim.weight_decay,
        grad_clip=actor.grad_clip,
        schedule=kind,
        warmup_steps=warmup,
        total_steps=updates,
        min_lr_ratio=actor.optim.min_lr_ratio,
        gradient_checkpointing=model.enable_gradient_checkpointing,
    )
    low, high = actor.clip_range
    return TrainSettings(
        actor=trained,
        reference=FsdpSettings(**common, trainable=False) if actor.use_kl_loss else None,
        objective={
            "clip_low": low,
            "clip_high": high,
            "clip_c": actor.clip_ratio_c,
            "agg_mode": actor.loss_agg_mode,
            "scale": actor.loss_scale_factor or config.data.max_response_length,
            "entropy_coeff": actor.entropy_coeff,
            "kl_coef": actor.kl_loss_coef if actor.use_kl_loss else None,
            "kl_type": actor.kl_loss_type,
        },
        by_std=config.algorithm.norm_adv_by_std_in_grpo,
        publish_dtype=_rollout_dtype(config, device),
    )


def _planner(config: Config, ranks: int) -> Planner:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    dynamic = actor.use_dynamic_bsz
    return Planner(
        ranks,
        actor.ppo_mini_batch_size,
        micro_batch_samples=None if dynamic else actor.ppo_micro_batch_size_per_gpu,
        micro_batch_tokens=actor.ppo_max_token_len_per_gpu if dynamic else None,
        forward_micro_batch_samples=None if dynamic else rollout.log_prob_micro_batch_size_per_gpu,
        forward_micro_batch_tokens=rollout.log_prob_max_token_len_per_gpu if dynamic else None,
        epochs=actor.ppo_epochs,
        shuffle_seed=config.trainer.seed if actor.shuffle else None,
    )


def _timetable(config: Config, data: RunData) -> Timetable:
    batch = config.data.train_batch_size
    return Timetable(
        batch=batch,
        total_steps=total_steps(config, data.train_rows),
        save_every=config.trainer.save_freq,
        validate_every=config.trainer.test_freq,
        validate_first=config.trainer.val_before_train,
        keep_checkpoints=config.trainer.max_ckpts_to_keep,
    )


def _answering(config: Config, data: RunData, episodes: EpisodePool) -> Answer:
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

    async def answer(split: str, row: int, group: int, count: int) -> list[SampleHandle]:
        seeds = [seed(split, group, number) for number in range(count)]
        return await episodes.run(split, row, group, seeds, sampling[split])

    return answer


def _evaluator(config: Config, data: RunData, answer: Answer) -> Evaluator | None:
    if not data.has_validation:
        return None
    count = config.actor_rollout_ref.rollout.val_kwargs.n
    return Evaluator(lambda row: answer("val", row, row, count), data.val_sources, batch=config.data.val_batch_size)


def _probe(config: Config, data: RunData, device: str) -> Probe:
    rollout = config.actor_rollout_ref.rollout
    coarser = max(_rollout_dtype(config, device), _compute_dtype(config, device), key=TOLERANCES.__getitem__)
    return Probe.random(
        data.vocabulary,
        tolerance=rollout.probe_tolerance or TOLERANCES[coarser],
        length=min(PROBE_LENGTH, max_sequence_tokens(config) - 1),
    )


def _transport(config: Config) -> Transport:
    name = _transport_name(config)
    return HostTransport() if name == "host" else DeviceTransport(name)


def _transport_name(config: Config) -> str:
    wanted = config.actor_rollout_ref.rollout.weight_transport
    return "host" if wanted == "auto" else wanted


async def _resume(config: Config, policy: PolicyGroup, stream: PromptStream, console: Console) -> int:
    """Load what there is to resume; the version to go on from, 0 for a fresh start."""
    mode = config.trainer.resume_mode
    if mode == "disable":
        return 0
    source = CheckpointDir(config.trainer.checkpoint_dir)
    step = source.latest()
    if mode == "path":
        path = Path(config.trainer.resume_from_path or "").expanduser()
        number = path.name.removeprefix("global_step_")
        if not number.isdigit():
            raise CheckpointError(f"trainer.resume_from_path={path}: must end with global_step_<number>")
        source, step = CheckpointDir(path.parent), int(number)
    if step is None:
        return 0
    saved = source.trainer(step)
    stream.load(saved["data"])
    await policy.load(str(source.step_dir(step) / "actor"))
    console.note(f"resumed from {source.step_dir(step)}: going on with step {step + 1}")
    return step


def _reward(config: Config) -> dict[str, Any]:
    function = config.reward.custom_reward_function
    return {"path": function.path, "name": function.name, "kwargs": function.reward_kwargs}


def _compute_dtype(config: Config, device: str) -> str:
    wanted = config.actor_rollout_ref.actor.fsdp_config.dtype
    return wanted if wanted != "auto" else ("float32" if device == "cpu" else "bfloat16")


def _rollout_dtype(config: Config, device: str) -> str:
    wanted = config.actor_rollout_ref.rollout.dtype
    return _compute_dtype(config, device) if wanted == "auto" else wanted


def _owned(device: str) -> str:
    return f"{os.cpu_count()} cores here" if device == "cpu" else "its GPUs"
