"""A checkpoint at every step costs at most a tenth of the step: it is written while the next one trains.

One run with real Ray workers, FSDP2 on 2 ranks and a model of 6 million parameters, whose checkpoint (weights and
moments) is 76 MB. Blocks of steps without saving and of steps that each save take turns; in the latter a checkpoint is
being written during every step, and the time that the loop stands still for copying and for a former checkpoint counts.
Of each kind the quicker half is averaged: what others do on the machine only adds. What a step would take with a
blocking save is printed as well.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import Stopwatch, finish, sized_for_addition
from transformers import AutoConfig, AutoModelForCausalLM

from verl.checkpoint.manifest import CheckpointDir, find_corruption
from verl.config.load import load
from verl.demo.assets import make_assets
from verl.tracking.console import Console
from verl.trainer.build.rl_builder import build_trainer

BOUND = 1.10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a model of 1 million, two steps each; time is not held")
    short = parser.parse_args().short
    with tempfile.TemporaryDirectory(prefix="verl-save-cost-") as directory:
        folder, watch = Path(directory), Stopwatch()
        make_assets(folder)
        parameters = enlarge(folder / "model", hidden=128 if short else 256, layers=4 if short else 6)
        seconds = asyncio.run(measured(folder, blocks=1 if short else 3, steps=2 if short else 3))
        last = CheckpointDir(folder / "run")
        size = sum(path.stat().st_size for path in last.step_dir(last.latest() or 0).rglob("*") if path.is_file())
        at_last = last.latest() == seconds["last"]
        damage = [words for step in last.steps() for words in find_corruption(last.step_dir(step))]
    none, saving, blocking = (quick(seconds[kind]) for kind in ("none", "saving", "blocking"))
    finish(
        "save_cost",
        not damage and at_last and (short or saving / none <= BOUND),
        ratio=round(saving / none, 3),
        ratio_of_medians=round(statistics.median(seconds["saving"]) / statistics.median(seconds["none"]), 3),
        bound=BOUND,
        step_s=round(none, 2),
        step_with_saving_s=round(saving, 2),
        stands_still_s=round(statistics.median(seconds["stall"]), 3),
        blocking_save_s=round(blocking, 2),
        ratio_if_it_blocked=round((none + blocking) / none, 3),
        checkpoint_mb=round(size / 1e6),
        parameters=parameters,
        steps=len(seconds["none"]) + len(seconds["saving"]),
        stolen=round(watch.stolen(), 3),
    )


def quick(seconds: list[float]) -> float:
    return statistics.mean(sorted(seconds)[: -(-len(seconds) // 2)])


async def measured(folder: Path, blocks: int, steps: int) -> dict[str, Any]:
    """Seconds of every step, by whether it saved."""
    seconds: dict[str, Any] = {"none": [], "saving": [], "stall": [], "blocking": [], "last": 0}
    [loaded] = load(settings(folder))
    async with build_trainer(loaded.config, Console()) as loop:
        await loop.task.weights.sync(0)

        async def step(kind: str | None = None) -> None:
            began = time.perf_counter()
            await loop.task.step(loop.version)
            loop.version += 1
            if kind == "saving":
                await save()
            if kind is not None:
                seconds[kind].append(time.perf_counter() - began)
                print(f"{kind:7} {seconds[kind][-1]:6.2f} s", flush=True)

        async def save() -> None:
            seconds["last"] = loop.version
            began = time.perf_counter()
            await loop.save()
            seconds["stall"].append(time.perf_counter() - began)

        async def blocking() -> None:
            began = time.perf_counter()
            await save()
            await loop.checkpointer.finish()
            seconds["blocking"].append(time.perf_counter() - began)

        await step()  # memory is taken, and files are read, in the first of each
        await blocking()
        seconds["stall"].clear()
        seconds["blocking"].clear()
        for _ in range(blocks):
            for _ in range(steps):
                await step("none")
            await save()
            seconds["stall"].pop()
            for _ in range(steps):
                await step("saving")  # while the one before is written
            await loop.checkpointer.finish()
            await step()
            await blocking()
            seconds["stall"].pop()
    return seconds


def settings(folder: Path) -> list[str]:
    return [
        *sized_for_addition(folder),
        "actor_rollout_ref.rollout.name=hf",
        "data.train_batch_size=16",
        "data.max_response_length=16",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "trainer.total_training_steps=1000",
        "trainer.val_before_train=False",
        "trainer.max_ckpts_to_keep=1",
    ]


def enlarge(path: Path, hidden: int, layers: int) -> int:
    """Another model in the place of the small one, with its tokenizer; its parameters."""
    config = AutoConfig.from_pretrained(path)
    config.hidden_size, config.intermediate_size = hidden, 4 * hidden
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    config.num_attention_heads, config.num_key_value_heads = hidden // 64, hidden // 64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
