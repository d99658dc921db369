"""Settings of supervised training -> its objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from verl.checkpoint.manifest import CheckpointDir
from verl.config.batch_sizes import count_total_steps, count_train_ranks
from verl.config.features import saves_hf
from verl.config.schema import SftConfig
from verl.config.sft_validation import find_hints
from verl.data.plan import MicroBatchLimit
from verl.data.stream import PromptStream
from verl.sft.batches import split_batch
from verl.sft.data import SFTData, SFTDataLoader, ValidationLoader, check_sft_files, read_sft_data
from verl.sft.trainer import SFTTrainer
from verl.sft.worker import SFTWorkerGroup
from verl.tracking.console import Console
from verl.tracking.metrics import Metrics, timer
from verl.trainer.checkpointing import Checkpointer
from verl.trainer.restarts import RestartTracker
from verl.trainer.setup import (
    WithRunInfo,
    device_hints,
    open_tracker,
    resolve_path,
    resume,
    start_runtime,
    with_changes,
)
from verl.trainer.train_loop import LoopSchedule
from verl.trainer.worker_settings import deadlines, fsdp_settings, lora_settings, optimizer_settings
from verl.training.settings import FsdpSettings
from verl.workers.base import RankSettings

__all__ = ["build_sft_trainer"]


@asynccontextmanager
async def build_sft_trainer(
    config: SftConfig, console: Console, *, restarts: RestartTracker | None = None
) -> AsyncIterator[SFTTrainer]:
    """A trainer whose processes are up, resumed if there is something to resume; leaving ends the processes."""
    times, restarts = Metrics(), restarts or RestartTracker(console)
    config = _absolute(config)
    check_sft_files(config)  # what can be seen to be wrong at once is said before anything is started
    async with AsyncExitStack() as closing:
        site = await closing.enter_async_context(start_runtime(config, console, restarts, times))
        config, ranks = site.config, count_train_ranks(site.config)
        model = SFTWorkerGroup.spawn(site.pool, ranks, share=1.0, deadlines=deadlines(config))
        closing.callback(model.close)
        with timer(times, "start_data"):
            data = await asyncio.to_thread(read_sft_data, config)
        schedule = _schedule(config, data)
        for note in (*data.notes, _outlook(schedule, data), *device_hints(config, site.device, find_hints)):
            console.note(note)
        with timer(times, "start_train_workers"):
            started = await model.start(rank_settings(config, schedule.total_steps, site.device))
        for note in started:
            console.note(note)
        stream = PromptStream(data.order)
        version = await resume(config, model, stream, console)
        restarts.resumed(version)
        tracker = open_tracker(config, console, schedule, version)
        closing.callback(tracker.close)
        tracker.log(times, version)
        cut = partial(split_batch, ranks=ranks, limit=_limit(config))
        loader = SFTDataLoader(data.train, data.order, schedule.batch, cut, start=stream.position, version=version)
        closing.callback(loader.close)
        yield SFTTrainer(
            loader=loader,
            model=model,
            validation=None if data.val is None else ValidationLoader(data.val, schedule.batch, cut),
            checkpointer=Checkpointer(
                WithRunInfo(model, config),
                CheckpointDir(config.trainer.checkpoint_dir),
                console,
                keep=config.trainer.max_ckpts_to_keep,
                deadline=deadlines(config).checkpoint,
            ),
            schedule=schedule,
            tracker=tracker,
            console=console,
            restarts=restarts,
            version=version,
        )


def rank_settings(config: SftConfig, steps: int, device: str) -> RankSettings:
    """What every rank is told."""
    model, contents = config.model, config.checkpoint
    return RankSettings(
        actor=FsdpSettings(
            model.path,
            role="train",
            lora=lora_settings(model.peft, config.trainer.seed),
            grad_clip=config.optim.grad_clip,
            gradient_checkpointing=model.enable_gradient_checkpointing,
            device=device,
            trust_remote_code=model.trust_remote_code,
            **fsdp_settings(model.fsdp_config, device),
            **optimizer_settings("optim", config.optim, steps),
        ),
        seed=config.trainer.seed,
        tokenizer_path=model.tokenizer_path,
        save_hf=saves_hf(config),
        save_contents={"actor": contents.save_contents},
        load_contents={"actor": contents.load_contents},
        deadlines=deadlines(config),
    )


def _limit(config: SftConfig) -> MicroBatchLimit:
    data = config.data
    if data.packing:
        return MicroBatchLimit(samples=None, tokens=data.max_token_len_per_gpu)
    return MicroBatchLimit(samples=data.micro_batch_size_per_gpu, tokens=None)


def _schedule(config: SftConfig, data: SFTData) -> LoopSchedule:
    return LoopSchedule(
        batch=config.data.train_batch_size,
        total_steps=count_total_steps(config, len(data.train)),
        save_every=config.trainer.save_freq,
        validate_every=config.trainer.test_freq,
        validate_first=config.trainer.val_before_train,
        validate_last=True,
    )


def _outlook(schedule: LoopSchedule, data: SFTData) -> str:
    epochs = schedule.total_steps * schedule.batch / len(data.train)
    lengths = data.train.lengths
    return (
        f"{schedule.total_steps:,} steps of {schedule.batch:,} examples: {epochs:.3g} epochs; an example has "
        f"{lengths.mean():,.0f} tokens on average, {lengths.max():,} at most"
    )


def _absolute(config: SftConfig) -> SftConfig:
    """Local paths in full, wherever the workers are started."""
    paths = {"path": resolve_path(config.model.path)}
    if config.model.tokenizer_path is not None:
        paths["tokenizer_path"] = resolve_path(config.model.tokenizer_path)
    folder = str(config.trainer.checkpoint_dir.absolute())
    return with_changes(config, {"model": paths, "trainer": {"default_local_dir": folder}})
