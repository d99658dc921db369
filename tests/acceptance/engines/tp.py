"""Engines over several devices: vLLM with tensor_parallel_size=2, on two cores.

The contract suite of rollout engines, with such an engine. Then GRPO through Ray, FSDP2 and vLLM: 2 train ranks and one
engine of 2 devices; trainer and engine agree on every sampled token to 1e-4. In the middle one of vLLM's
tensor-parallel processes is killed: the engine comes back, every step is done, and nothing stays in /dev/shm. At last a
reward model over 2 devices scores as it does with one. `--short` (CI): 2 steps and the kill.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from _common import ROOT, finish, metrics_of, short_grpo  # isort: skip - puts tests/ on the path
import torch
from tiny import tiny_qwen2
from transformers import Qwen2ForSequenceClassification

from verl.config.load import load
from verl.demo.assets import make_assets
from verl.rewards.settings import RewardModelSettings
from verl.tracking.console import Console
from verl.trainer.build.rl_builder import build_trainer
from verl.trainer.rl_trainer import RLTrainer
from verl.workers.rewards import RewardActor

LIMIT = 1e-4
METRIC = "training/rollout_logprobs_diff_max"
SHARED = Path("/dev/shm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    before, steps = list_shared(), 2 if options.short else 5
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="verl-tp-") as directory:
        folder = Path(directory)
        make_assets(folder)
        two_devices = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
        killed = asyncio.run(train([*short_grpo(folder, prompts=16, steps=steps), two_devices]))
        lines = [line for line in metrics_of(folder / "run") if METRIC in line]
        gap = max(line[METRIC] for line in lines)
        restarts = max(line.get("faults/engine_restarts", 0) for line in lines)
        passed = len(lines) == steps and gap <= LIMIT and killed and restarts == 1
        if not options.short:
            figures["contract"] = run_contract()
            figures["reward_model_difference"] = compare_reward_models(folder / "reward")
            passed = passed and figures["contract"] and figures["reward_model_difference"] <= LIMIT
    left = sorted(list_shared() - before - list_mapped())
    finish("tp", passed and not left, steps=len(lines), gap=gap, restarts=restarts, left=left, **figures)


def list_shared() -> set[str]:
    return {path.name for path in SHARED.iterdir() if path.name.startswith(("vllm", "psm_"))}


def list_mapped() -> set[str]:
    """Return the files in use: those of other programs on this machine, since the engines of this one have ended."""
    mapped: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mapped |= {Path(each.path).name for each in process.memory_maps() if each.path.startswith(f"{SHARED}/")}
    return mapped


async def train(overrides: list[str]) -> bool:
    """Train, and kill a tensor-parallel process of the engine before the second step."""
    step, was_killed = RLTrainer.step, False

    async def kill_and_step(self: RLTrainer, version: int) -> Any:
        nonlocal was_killed
        if version == 1:
            was_killed = kill_worker()
        return await step(self, version)

    RLTrainer.step = kill_and_step  # type: ignore[method-assign]
    [loaded] = load(overrides)
    async with build_trainer(loaded.config, Console()) as loop:
        await loop.fit()
    return was_killed


def kill_worker() -> bool:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "VLLM::Worker_TP1" in " ".join(process.cmdline()):
                print(f"killing {process.cmdline()[0]}, process {process.pid}", flush=True)
                process.kill()
                return True
    return False


def run_contract() -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "contract", "tests/contract/test_rollout_engine.py"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "VERL_TEST_ENGINES": "vllm_tp2"})
    return done.returncode == 0


def compare_reward_models(folder: Path) -> float:
    """Return the largest difference of scores between a reward model on one device and on two."""
    torch.manual_seed(0)
    config = tiny_qwen2(num_labels=1, initializer_range=0.2, pad_token_id=0)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    texts = [[5 + k, *range(1, 2 + k)] for k in range(8)]

    context = multiprocessing.get_context("spawn")  # vLLM reads the settings of an engine once per process
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as processes:
        one, two = processes.map(score_texts, [str(folder)] * 2, [texts] * 2, [1, 2])
    return max(abs(a - b) for a, b in zip(one, two, strict=True))


def score_texts(model: str, texts: list[list[int]], width: int) -> list[float]:
    cores = "|".join(map(str, range(width)))
    settings = RewardModelSettings(
        "verl.rollout.vllm.reward_model:VllmRewardModel",
        model,
        batch=8,
        deadline_s=120.0,
        tensor_parallel_size=width,
        cpu_cores=cores,
    )

    async def score() -> list[float]:
        actor = RewardActor(settings)
        await actor.start()
        try:
            return [float(value) for value in await asyncio.gather(*map(actor.score, texts))]  # type: ignore[arg-type]
        finally:
            await actor.close()

    return asyncio.run(score())


if __name__ == "__main__":
    main()
