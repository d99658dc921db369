"""Engines join, leave and sleep in a real run: episode workers in other processes learn of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from verl.config.load import load
from verl.demo.folder import Assets
from verl.rollout.supervisor import EngineState, EngineSupervisor
from verl.tracking.console import Console
from verl.trainer.build.placement import place_engines
from verl.trainer.build.rl_builder import RLBuilder
from verl.trainer.restarts import RestartTracker
from verl.trainer.rl_trainer import RLTrainer
from verl.types import SampleHandle
from verl.workers.rollout import RemoteEngine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def run_steps(kind: str, assets: Assets, folder: Path, *more: str) -> list[dict[str, object]]:
    """Run a function of this file in a process of its own."""
    settings = [
        f"actor_rollout_ref.model.path={assets.model}",
        f"data.train_files={assets.train}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={folder / 'run'}",
    ]
    command = [sys.executable, __file__, kind, *settings, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    steps: list[dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return steps


def test_an_engine_that_joins_generates_and_replaces_one_that_leaves(assets: Assets, tmp_path: Path) -> None:
    assert run_steps("join_and_leave", assets, tmp_path) == [
        {"engines": [0], "samples": 32, "version": 1},
        {"engines": [0, 1], "samples": 32, "version": 2},
        {"engines": [1], "samples": 32, "version": 3},
    ]


@pytest.mark.rotating(1)
def test_engines_on_lent_devices_generate_too_and_sleep_while_the_model_trains(assets: Assets, tmp_path: Path) -> None:
    own = ("actor_rollout_ref.hybrid_engine=False", "actor_rollout_ref.rollout.n_gpus_per_node=1")
    steps = run_steps("lend", assets, tmp_path, *own, "actor_rollout_ref.rollout.lend_train_devices=True")
    step = {"engines": [0, 1], "samples": 32, "asleep": [1]}
    assert steps == [step | {"version": 1}, step | {"version": 2}]


@asynccontextmanager
async def recording(overrides: list[str]) -> AsyncIterator[tuple[RLBuilder, RLTrainer, list[dict[str, object]]]]:
    """Build a run and begin it. Its steps say which engines have generated their samples."""
    [loaded] = load(overrides)
    console = Console()
    steps: list[dict[str, object]] = []
    async with AsyncExitStack() as closing:
        builder = RLBuilder(loaded.config, console, RestartTracker(console), closing)
        trainer = (await builder.build()).task
        take = trainer.buffer.take

        async def take_and_record(count: int) -> list[SampleHandle]:
            samples = await take(count)
            engines = sorted({engine_id for sample in samples for engine_id in sample.engines})
            steps.append({"engines": engines, "samples": len(samples)})
            return samples

        trainer.buffer.take = take_and_record  # type: ignore[method-assign]
        await trainer.begin(0)
        yield builder, trainer, steps


def supervisor_of(trainer: RLTrainer) -> EngineSupervisor:
    supervisor = trainer.weights._receivers
    assert isinstance(supervisor, EngineSupervisor)
    return supervisor


async def lend(overrides: list[str]) -> list[dict[str, object]]:
    """Train two steps, and record which engines sleep during the update."""
    async with recording(overrides) as (_, trainer, steps):
        update = trainer.policy.update

        async def update_and_record(*arguments: Any) -> Any:
            steps[-1]["asleep"] = sorted(supervisor_of(trainer).view.asleep)
            return await update(*arguments)

        trainer.policy.update = update_and_record  # type: ignore[method-assign]
        for version in range(2):
            metrics = await trainer.step(version)
            steps[-1]["version"] = metrics["weights/version"]
    return steps


async def join_and_leave(overrides: list[str]) -> list[dict[str, object]]:
    """Train three steps: with one engine, with a second one that joins, and without the first."""
    async with recording(overrides) as (builder, trainer, steps):
        supervisor = supervisor_of(trainer)

        def spawn(engine_id: int) -> RemoteEngine:
            [engine] = place_engines(builder.config, builder.pool, builder.device, [])
            return engine

        for version in range(3):
            metrics = await trainer.step(version)
            steps[-1]["version"] = metrics["weights/version"]
            if version == 0:
                joined = supervisor.add(spawn)
                while supervisor.states[joined] is not EngineState.READY:
                    await supervisor.run_while_available(asyncio.sleep(0.1))
            elif version == 1:
                await supervisor.remove(0, drain_timeout_s=60)
    return steps


if __name__ == "__main__":
    kind, *settings = sys.argv[1:]
    print(json.dumps(asyncio.run({"lend": lend, "join_and_leave": join_and_leave}[kind](settings))))
