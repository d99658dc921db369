"""Engines join and leave every 20 seconds: no request is lost, throughput follows their number, and a run still learns.

make show-elastic [ARGS="--steps 160"]

Two parts:

- Simulated engines of 8 slots, with the real scaler, supervisor, pool and weight sync, for 10 simulated minutes: every
  request gets one reply, and at least 0.85 of the slots of the engines that are ready are busy on average, although an
  engine that joins gets only new requests.
- The addition task with Ray, FSDP2 and vLLM and `trainer.max_staleness=2`: `verl scale` asks for another number of
  engines, from 1 to 3, every 20 seconds until the run ends. `verl audit` finds every prompt trained once and in time,
  no group lacks a response, and held-out accuracy at the end is within 0.05 of a run of as many steps with one engine.

`--short`: 12 small steps with engines of transformers, whose number changes every 10 seconds, and no run to compare
with.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from _common import finish, metrics_of, sized_for_addition, train  # isort: skip - puts tests/ on the path

import numpy as np
from simulated_clock import simulate

from verl.commands.runs.audit import audit_run
from verl.demo.assets import make_assets
from verl.demo.warmup import warm_up
from verl.errors import ProcessLostError
from verl.rollout.replica_pool import EnginePool
from verl.rollout.scaling import POLL_S, REQUEST, EngineScaler, write_json
from verl.rollout.supervisor import EngineState, EngineSupervisor
from verl.types import Completion, SamplingParams
from verl.weights.probe import Probe
from verl.weights.sync import HostTransport, WeightSync

EXAMPLE = "examples/grpo/grpo_config.yaml"
METRIC = "val/addition/mean@1"
PERIOD_S, SIMULATED_S, REAL_S = 20.0, 600.0, 600.0
SLOTS, CLIENTS = 8, 100
LIMIT_BUSY, LIMIT_DIFFERENCE = 0.85, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    simulated = simulate(SlotRun().play())
    print(simulated, flush=True)
    with tempfile.TemporaryDirectory(prefix="verl-elastic-") as directory:
        folder = Path(directory)
        make_assets(folder)
        print(f"before reinforcement learning: {warm_up(folder)}", flush=True)
        steps = options.steps or (12 if options.short else 160)
        elastic = run_elastic(folder, steps, short=options.short)
        fixed = {} if options.short else run_fixed(folder, steps)
    is_simulated = simulated["busy"] >= LIMIT_BUSY and simulated["lost"] == 0
    is_real = not elastic["problems"] and elastic["joined"] >= 1 and elastic["left"] >= 1
    if not options.short:
        is_real &= elastic["seconds"] >= REAL_S and abs(elastic["accuracy"] - fixed["accuracy"]) <= LIMIT_DIFFERENCE
    finish("elastic", is_simulated and is_real, short=options.short, simulated=simulated, elastic=elastic, fixed=fixed)


class SlotEngine:
    """Writes a token per second in each of its slots; takes 5 seconds to start and one to load weights."""

    def __init__(self) -> None:
        self._slots, self._version, self.tokens = asyncio.Semaphore(SLOTS), -1, 0
        self._tasks = set[asyncio.Task[Any]]()
        self._is_open = True

    async def start(self) -> None:
        await asyncio.sleep(5.0)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        async with self._slots:
            for _ in range(sampling.max_tokens):
                await asyncio.sleep(1.0)
                if not self._is_open:
                    raise ProcessLostError("its process has ended")
                self.tokens += 1
        tokens = list(range(sampling.max_tokens))
        zeros = np.zeros(len(tokens))
        return Completion(tokens, zeros, zeros.astype(np.int32) + self._version, "length")

    async def start_weight_update(self) -> None: ...

    async def load_bucket(self, bucket: Any) -> None:
        await asyncio.sleep(1.0)

    async def finish_weight_update(self, version: int) -> None:
        self._version = version

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[0.0] * (len(each) - 1) for each in sequences]

    async def version(self) -> int:
        return self._version

    async def is_ready(self) -> bool:
        return self._version >= 0

    async def enable(self, version: int) -> None: ...

    async def end(self) -> None: ...

    async def close(self) -> None:
        self._is_open = False


class Weights:
    """A trained model, whose log-probs are those of the engines."""

    async def pack_weights(self) -> AsyncGenerator[float, None]:
        yield 0.0

    async def send_weights(self, backend: str, receivers: Sequence[object], version: int) -> None:
        raise AssertionError("the transport is that of the host")

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[0.0] * (len(each) - 1) for each in sequences]


class Devices:
    """A cluster with a device for every engine."""

    def __init__(self, engines: list[SlotEngine]) -> None:
        self._engines = engines

    def describe_limit(self, count: int) -> str:
        return ""

    def find(self) -> bool:
        return True

    def stop_finding(self) -> None: ...

    def spawn(self, engine_id: int) -> SlotEngine:
        self._engines.append(SlotEngine())
        return self._engines[-1]

    def release(self, engine_id: int) -> None: ...


class SlotRun:
    """Requests without end to engines whose number changes every 20 seconds."""

    def __init__(self) -> None:
        self.engines = [SlotEngine()]
        self.sent = self.replies = 0
        self.slot_seconds = self.tokens = 0.0  # while their engines took requests

    async def play(self) -> dict[str, Any]:
        supervisor = EngineSupervisor(self.engines, lambda event: None)
        pool = EnginePool(supervisor.view)
        supervisor.follow(pool.update)
        weights = WeightSync(Weights(), supervisor, HostTransport(), Probe(((1, 2),), 1e-3))
        supervisor.start(weights.sync_one)
        await weights.sync(0)
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            scaler = EngineScaler(supervisor, Devices(self.engines), folder, lambda line: None)
            scaler.start()
            clients = [asyncio.ensure_future(self._ask(pool, index)) for index in range(CLIENTS)]
            measuring = asyncio.ensure_future(self._measure(supervisor))
            chance, asked = random.Random(0), []
            for _ in range(int(SIMULATED_S / PERIOD_S)):
                asked.append(chance.choice([1, 2, 3, 4, 6, 8]))
                write_json(folder / REQUEST, {"engines": asked[-1]})
                await asyncio.sleep(PERIOD_S)
            measuring.cancel()
            for client in clients:
                client.cancel()
            outcomes = await asyncio.gather(*clients, return_exceptions=True)
            failed = [each for each in outcomes if not isinstance(each, asyncio.CancelledError)]
            await scaler.close()
            pool.close()
            await supervisor.close()
        lost = self.sent - self.replies - CLIENTS
        busy = round(self.tokens / self.slot_seconds, 3)
        counts = {"engines": len(self.engines), "replies": self.replies, "lost": lost + len(failed), "busy": busy}
        return counts | {"asked": asked}

    async def _ask(self, pool: EnginePool, client: int) -> None:
        for index in itertools.count():
            self.sent += 1
            length = random.Random(f"{client} {index}").randint(1, 10)
            reply = await pool.generate([client, index], SamplingParams(length, 1.0))
            self.replies += len(reply.token_ids) == length

    async def _measure(self, supervisor: EngineSupervisor) -> None:
        """Count the slots of engines that take requests, and what these slots generate."""
        while True:
            ready = [each for each, state in supervisor.states.items() if state is EngineState.READY]
            before = sum(self.engines[each].tokens for each in ready)
            await asyncio.sleep(POLL_S)
            self.tokens += sum(self.engines[each].tokens for each in ready) - before
            self.slot_seconds += len(ready) * SLOTS * POLL_S


def settings_of(folder: Path, steps: int, name: str, prompts: int = 64) -> list[str]:
    return [
        *sized_for_addition(folder),
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.rollout.num_engines=1",
        "trainer.max_staleness=2",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
        f"trainer.default_local_dir={folder / name}",
    ]


def run_elastic(folder: Path, steps: int, *, short: bool) -> dict[str, Any]:
    """Return what happened in a run whose number of engines changes until it ends."""
    run, ended = folder / "elastic", threading.Event()
    period_s = PERIOD_S / 2 if short else PERIOD_S
    changing = threading.Thread(target=change_engines, args=(run, ended, period_s), daemon=True)
    changing.start()
    prompts, more = (16, ["actor_rollout_ref.rollout.name=hf"]) if short else (64, [])
    code, watch = train(*settings_of(folder, steps, "elastic", prompts), *more, config=EXAMPLE, deadline_s=3600)
    ended.set()
    changing.join()
    lines = metrics_of(run)
    audit = audit_run(run)
    problems = [*audit.problems, *([f"exit code {code}"] if code else [])]
    if audit.trained != steps * prompts or audit.unscored:
        problems.append(f"{audit.trained} prompts were trained, {audit.unscored} of them without a response")
    states = [json.loads(line) for line in (run / "scaled.jsonl").read_text().splitlines()]
    return {
        "seconds": round(watch.seconds()),
        "steps": steps,
        "requests": len(states),
        "joined": sum(state["joined"] for state in states),
        "left": sum(state["left"] for state in states),
        "accuracy": [line[METRIC] for line in lines if METRIC in line][-1],
        "problems": problems,
    }


def change_engines(run: Path, ended: threading.Event, period_s: float) -> None:
    """Ask for another number of engines again and again, as a user would."""
    numbers, steps = itertools.cycle([2, 1, 3, 2, 3, 1]), run / "metrics.jsonl"
    while not (steps.exists() and '"reward/mean"' in steps.read_text()):
        if ended.wait(1.0):
            return
    while not ended.is_set():
        command = [sys.executable, "-m", "verl", "scale", str(run), "--engines", str(next(numbers))]
        done = subprocess.run([*command, "--wait", str(period_s)], capture_output=True, text=True)
        print("".join(f"    verl scale| {line}\n" for line in (done.stdout + done.stderr).splitlines()), end="")
        joined = sum(line.endswith(": joining") for line in done.stdout.splitlines())
        left = sum(line.endswith(": left") for line in done.stdout.splitlines())
        with (run / "scaled.jsonl").open("a") as record:
            record.write(json.dumps({"joined": joined, "left": left}) + "\n")
        ended.wait(period_s)


def run_fixed(folder: Path, steps: int) -> dict[str, Any]:
    """Return what happened in a run with one engine."""
    code, watch = train(*settings_of(folder, steps, "fixed"), config=EXAMPLE, deadline_s=3600)
    lines = metrics_of(folder / "fixed")
    accuracy = [line[METRIC] for line in lines if METRIC in line][-1] if code == 0 else 0.0
    return {"seconds": round(watch.seconds()), "accuracy": accuracy}


if __name__ == "__main__":
    main()
