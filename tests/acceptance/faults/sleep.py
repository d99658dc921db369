"""Training and generation share devices: engines sleep while the model is trained, and nothing exceeds the memory.

Two parts. In the simulation (tests/simulated_run.py) engines and trainer keep a ledger of a device's memory: engines
that start, sleep, wake for the weights and then for the cache, a trainer that trains and sends. No phase may exceed the
device, no request may reach an engine that sleeps, and engines that die while they fall asleep, sleep, wake or load are
brought back. Then a real run with free_cache_engine=True, real Ray, FSDP2 and vLLM (whose CPU worker takes the calls,
and frees nothing): vLLM's process is killed while it sleeps, and while weights are sent to it; every step is done, and
trainer and engine agree on every sampled token. 4,000 seeds; 300 and a shorter run with `--short` (CI).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from _common import finish, metrics_of, short_grpo  # isort: skip - puts tests/ on the path
from simulated_run import Violation, run_seed
from simulated_scenario import Scenario

from verl.config.load import load
from verl.demo.assets import make_assets
from verl.rollout.supervisor import EngineEvent, EngineState
from verl.tracking.console import Console
from verl.trainer.build.rl_builder import build_trainer
from verl.trainer.restarts import RestartTracker
from verl.weights.sync import HostTransport, Receiver, Source, WeightSync

LIMIT = 1e-4
METRIC = "training/rollout_logprobs_diff_max"
LOADING_S = 0.05  # after which an engine is killed that weights are sent to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    simulated = simulate(300 if options.short else 4_000)
    kills = {1: "asleep"} if options.short else {1: "asleep", 3: "loading", 5: "asleep", 6: "loading"}
    steps = 3 if options.short else 8
    with tempfile.TemporaryDirectory(prefix="verl-sleep-") as directory:
        folder = Path(directory)
        make_assets(folder)
        settings = [*short_grpo(folder, prompts=32, steps=steps), "actor_rollout_ref.rollout.free_cache_engine=True"]
        events = asyncio.run(train(settings, kills))
        lines = [line for line in metrics_of(folder / "run") if METRIC in line]
    recovered = sum(event.state is EngineState.READY and event.previous is EngineState.PROBING for event in events)
    gap = max(line[METRIC] for line in lines)
    passed = not simulated["broken"] and len(lines) == steps and recovered == len(kills) and gap <= LIMIT
    finish("sleep", passed, **simulated, steps=len(lines), killed=list(kills.values()), recovered=recovered, gap=gap)


def simulate(count: int) -> dict[str, Any]:
    """Run the first `count` seeds in which devices are shared."""
    counts, broken, seed = Counter[str](), [], -1
    for _ in range(count):
        seed += 1
        while not Scenario.draw(seed).shares_devices:
            seed += 1
        try:
            outcome = run_seed(seed)
        except Violation as error:
            print(f"seed {seed}: {error}; again: make show-simulation ARGS='--seed {seed}'")
            broken.append(seed)
            continue
        counts.update(steps=outcome.steps, faults=outcome.faults, restarts=outcome.restarts)
        counts["died_falling_asleep"] += sum("falling asleep" in line for line in outcome.history)
    return {"seeds": count, "broken": broken, **{f"simulated_{name}": value for name, value in counts.items()}}


async def train(overrides: list[str], kills: dict[int, str]) -> list[EngineEvent]:
    """Train; in the steps that `kills` names, kill an engine while it sleeps or loads. Return what engines did."""
    events: list[EngineEvent] = []
    free_devices, send = WeightSync.free_devices, HostTransport.send
    step = 0

    async def free_and_kill(self: WeightSync) -> None:
        nonlocal step
        step += 1
        await free_devices(self)
        if kills.get(step) == "asleep":
            kill_engine()

    async def send_and_kill(
        self: HostTransport, source: Source, receivers: Sequence[Receiver], version: int
    ) -> list[Any]:
        sending = asyncio.ensure_future(send(self, source, receivers, version))
        if kills.get(version) == "loading" and len(receivers) > 1:
            await asyncio.sleep(LOADING_S)
            kill_engine()
        return await sending

    class Restarts(RestartTracker):
        def engine(self, event: EngineEvent) -> None:
            events.append(event)
            super().engine(event)

    WeightSync.free_devices = free_and_kill  # type: ignore[method-assign]
    HostTransport.send = send_and_kill  # type: ignore[method-assign]
    [loaded] = load(overrides)
    console = Console()
    async with build_trainer(loaded.config, console, restarts=Restarts(console)) as loop:
        await loop.fit()
    return events


def kill_engine() -> None:
    for process in psutil.Process().children(recursive=True):
        if "VLLM::EngineCore" in " ".join(process.cmdline()):
            print(f"killing vLLM's process {process.pid}", flush=True)
            return process.kill()
    raise SystemExit("there is no process of vLLM to kill")


if __name__ == "__main__":
    main()
