"""What the proofs about agents share: a small chat model with a BPE tokenizer, and its warm-up on conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from chat_bpe import bpe_tokenizer
from transformers import AutoTokenizer

from verl.data.micro_batches import MicroBatchLimit
from verl.demo.assets import make_model, write_weights
from verl.sft.examples import conversation_example
from verl.sft.model import SFTModel
from verl.sft.trainer import split_batch
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import close_process_group, init_process_group
from verl.training.settings import Schedule

BATCH = 32
PROMPTS = 32  # of a step of RL
Conversation = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]  # their schemas


def make_chat_model(folder: Path, texts: Sequence[str]) -> None:
    """Write a randomly initialized model of 0.7 million parameters, with a tokenizer trained on `texts`."""
    tokenizer = bpe_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    model = make_model(tokenizer)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    write_weights(folder, model.named_parameters())


def warm_up(folder: Path, draw: Callable[[], tuple[Conversation, Tools]], *, steps: int) -> float:
    """Train the model in `folder` in place on conversations with tools, drawn at random; return the last loss."""
    torch.set_num_threads(1)
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        schedule = Schedule(3e-3, warmup_steps=20)
        settings = FsdpSettings(str(folder), schedule=schedule, betas=(0.9, 0.95), weight_decay=0.0)
        model = SFTModel(FsdpEngine(settings))
        loss = float("nan")
        for step in range(steps):
            batch = [
                conversation_example(tokenizer, messages, {"tools": list(tools) or None}, [tokenizer.eos_token_id])
                for messages, tools in (draw() for _ in range(BATCH))
            ]
            [rank_batch] = split_batch(batch, ranks=1, limit=MicroBatchLimit(samples=BATCH, tokens=None))
            loss = model.update(rank_batch)["train/loss"]
            if step % 50 == 0:
                print(f"warm-up step {step}: loss {loss:.3f}", flush=True)
        write_weights(folder, model.engine.weights())
        return float(loss)
    finally:
        close_process_group()


def conversation_grpo(folder: Path, steps: int, *, short: bool, validate_every: int) -> list[str]:
    """Settings of GRPO with episodes of several turns, on two ranks and two engines. Validation samples as training."""
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'test.parquet'}",
        f"data.train_batch_size={PROMPTS}",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=2",
        f"trainer.default_local_dir={folder / 'run'}",
        f"trainer.deterministic={short}",  # few steps are too few to average what is drawn
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps if short else validate_every}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
    ]
