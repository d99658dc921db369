"""Engines join and leave a real run: episode workers in other processes learn of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from verl.config.load import load
from verl.demo.folder import Assets
from verl.rollout.supervisor import EngineState, EngineSupervisor
from verl.tracking.console import Console
from verl.trainer.build.placement import place_engines
from verl.trainer.build.rl_builder import RLBuilder
from verl.trainer.restarts import RestartTracker
from verl.types import SampleHandle
from verl.workers.rollout import RemoteEngine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def test_an_engine_that_joins_generates_and_replaces_one_that_leaves(assets: Assets, tmp_path: Path) -> None:
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
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    done = subprocess.run([sys.executable, __file__, *settings], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads(done.stdout.splitlines()[-1])
    assert steps == [
        {"engines": [0], "samples": 32, "version": 1},
        {"engines": [0, 1], "samples": 32, "version": 2},
        {"engines": [1], "samples": 32, "version": 3},
    ]


async def train(overrides: list[str]) -> list[dict[str, object]]:
    """Train three steps: with one engine, with a second one that joins, and without the first."""
    [loaded] = load(overrides)
    config, console = loaded.config, Console()
    steps: list[dict[str, object]] = []
    async with AsyncExitStack() as closing:
        builder = RLBuilder(config, console, RestartTracker(console), closing)
        trainer = (await builder.build()).task
        supervisor = trainer.weights._receivers
        assert isinstance(supervisor, EngineSupervisor)
        take = trainer.buffer.take

        async def take_and_record(count: int) -> list[SampleHandle]:
            samples = await take(count)
            engines = sorted({engine_id for sample in samples for engine_id in sample.engines})
            steps.append({"engines": engines, "samples": len(samples)})
            return samples

        def spawn(engine_id: int) -> RemoteEngine:
            [engine] = place_engines(config, builder.pool, builder.device, [])
            return engine

        trainer.buffer.take = take_and_record  # type: ignore[method-assign]
        await trainer.begin(0)
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
    print(json.dumps(asyncio.run(train(sys.argv[1:]))))
