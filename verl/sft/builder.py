"""Builds an SFT run from its settings: one method per stage, in the order of `SFTBuilder.build`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from verl.config.batch_sizes import count_sequence_ranks, count_total_steps
from verl.config.checks import SFT_HINTS
from verl.config.features import saves_hf
from verl.config.schema import SftConfig
from verl.data.micro_batches import MicroBatchLimit
from verl.data.samplers import PromptStream
from verl.memory_plan.out_of_memory import format_memory_advice, list_offload_settings
from verl.sft.data import SFTData, read_sft_data
from verl.sft.trainer import SFTDataLoader, SFTTrainer, split_batch
from verl.sft.worker import SFTWorkerGroup
from verl.tracking.console import Console
from verl.tracking.metrics import timer
from verl.tracking.phases import PHASES
from verl.trainer.build.runtime import RunBuilder, device_hints
from verl.trainer.build.worker_settings import lora_settings, model_settings, timeouts, with_optimizer
from verl.trainer.restarts import RestartTracker
from verl.trainer.train_loop import LoopSchedule, TrainLoop
from verl.training.settings import CHUNK_POSITIONS
from verl.workers.train_settings import RankSettings


@asynccontextmanager
async def build_sft_trainer(
    config: SftConfig,
    console: Console,
    *,
    restarts: RestartTracker | None = None,
    origins: Mapping[str, str] | None = None,
) -> AsyncIterator[TrainLoop[SFTTrainer]]:
    """Start the processes of a run and resume it if it has a checkpoint; on exit, end the processes.

    `origins` say where the given settings come from.
    """
    async with AsyncExitStack() as closing:
        yield await SFTBuilder(config, console, restarts or RestartTracker(console), closing, origins).build()


class SFTBuilder(RunBuilder[SftConfig]):
    """The stages of building a run."""

    paths = ("model.path", "model.tokenizer_path", "model.lora_adapter_path")

    async def build(self) -> TrainLoop[SFTTrainer]:
        await self.start_runtime()
        model = await self.spawn_train_workers(SFTWorkerGroup)
        with timer(self.times, "start_data"), self.console.stage("reading the data"):
            data = await asyncio.to_thread(read_sft_data, self.config)
        schedule = build_schedule(self.config, data)
        self.note([*data.notes, _describe(schedule, data), *device_hints(self.config, self.device, SFT_HINTS)])
        with timer(self.times, "start_train_workers"), self.console.stage("starting the train workers"):
            self.note(await model.start(rank_settings(self.config, schedule.total_steps, self.device)))
        stream = PromptStream(data.order)
        version = await self.resume(model, stream, schedule)
        sizes = self.config.data
        limit = MicroBatchLimit(
            samples=None if sizes.packing else sizes.micro_batch_size_per_gpu,
            tokens=sizes.max_token_len_per_gpu * count_sequence_ranks(self.config) if sizes.packing else None,
        )
        split = partial(split_batch, ranks=model.layout.data_size, limit=limit)
        loader = SFTDataLoader(data.train, data.order, schedule.batch, split, start=stream.position, version=version)
        self._closing.callback(loader.close)
        trainer = SFTTrainer(loader, model, data.val, self.open_record(PHASES, version))
        return self.build_loop(trainer, model, schedule, version)


def rank_settings(config: SftConfig, steps: int, device: str) -> RankSettings:
    model, contents = config.model, config.checkpoint
    settings = replace(
        model_settings(model, model.path, device),
        role="train",
        lora=lora_settings(model.peft, config.trainer.seed, model.lora_adapter_path),
        grad_clip=config.optim.grad_clip,
        max_skipped_steps=config.trainer.faults.max_skipped_steps,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        trust_remote_code=model.trust_remote_code,
        fp32_lm_head=model.fp32_lm_head,
        logprob_chunk=model.logprob_chunk_size,
        sequence_parallel_size=model.ulysses_sequence_parallel_size,
    )
    return RankSettings(
        actor=with_optimizer(settings, "optim", config.optim, steps),
        seed=config.trainer.seed,
        external_modules=model.external_modules,
        tokenizer_path=model.tokenizer_path,
        save_hf=saves_hf(config),
        save_contents={"actor": contents.save_contents},
        load_contents={"actor": contents.load_contents},
        timeouts=timeouts(config),
        memory_advice=_memory_advice(config),
    )


def _memory_advice(config: SftConfig) -> str:
    data, model = config.data, config.model
    name = "max_token_len_per_gpu" if data.packing else "micro_batch_size_per_gpu"
    switches = {"model.enable_gradient_checkpointing": model.enable_gradient_checkpointing}
    switches |= list_offload_settings("model", model)
    chunk = model.logprob_chunk_size or CHUNK_POSITIONS
    limits = {f"data.{name}": getattr(data, name), "model.logprob_chunk_size": chunk}
    return format_memory_advice(limits, switches)


def build_schedule(config: SftConfig, data: SFTData) -> LoopSchedule:
    return LoopSchedule(
        batch=config.data.train_batch_size,
        total_steps=count_total_steps(config, len(data.train)),
        save_every=config.trainer.save_freq,
        validate_every=config.trainer.test_freq,
        validate_first=config.trainer.val_before_train,
        validate_last=True,
    )


def _describe(schedule: LoopSchedule, data: SFTData) -> str:
    epochs = schedule.total_steps * schedule.batch / len(data.train)
    lengths = data.train.lengths
    return (
        f"{schedule.total_steps:,} steps of {schedule.batch:,} examples: {epochs:.3g} epochs; an example has "
        f"{lengths.mean():,.0f} tokens on average, {lengths.max():,} at most"
    )
