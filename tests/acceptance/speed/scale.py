"""The controller of 1,024 train ranks and 256 engines: its time, its memory, and what it sends at the start.

make show-scale [ARGS=--short]

The real RLTrainer with its buffer, planner, clients, supervisor and weight sync trains steps of 16,384 samples around
workers that are simulated (tests/simulated_cluster.py), in one process without Ray. Arguments and replies are pickled,
as Ray does; what Ray itself does, and the workers, is not measured. Held: at most 1 s of CPU time of the controller per
step (median), memory that does not grow over 100 steps, and calls and bytes per train rank at the start that are the
same for 256 and 1,024 ranks; so are the calls for buckets of weights, which only rank 0 gets. Also printed: how the
time grows with samples, ranks and engines (exponents), and what a request costs in the pool of an episode worker.
`--short` (CI) takes an eighth of all, and holds no times.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from _common import finish  # isort: skip - puts tests/ on the path
import numpy as np
import psutil
from recording_console import RecordingConsole
from simulated_clock import simulate
from simulated_cluster import Cluster

from verl.config.batch_sizes import RANKS_PER_EPISODE_WORKER, count_train_ranks
from verl.config.load import load
from verl.config.schema import Config
from verl.data.samplers import PromptStream, SequentialSampler
from verl.rewards.result import FailureTracker
from verl.rollout.engine import EngineView
from verl.rollout.replica_pool import EnginePool
from verl.tracking.sink import FunctionSink
from verl.tracking.throughput import Throughput
from verl.trainer.buffer.episode_buffer import EpisodeBuffer
from verl.trainer.build.placement import place_engines
from verl.trainer.build.rl_builder import build_supervisor
from verl.trainer.build.worker_settings import build_planner, episode_settings, timeouts, train_settings
from verl.trainer.launcher import rare_garbage_collection
from verl.trainer.records.samples import RecordSettings, SampleRecorder
from verl.trainer.records.step import StepRecords
from verl.trainer.restarts import RestartTracker
from verl.trainer.rl_trainer import RLTrainer
from verl.types import Completion, SamplingParams
from verl.weights.probe import Probe
from verl.weights.sync import HostTransport, WeightSync
from verl.workers.episode_pool import EpisodeClient, EpisodePool
from verl.workers.train import PolicyGroup

RESPONSES, PER_NODE, MINI_BATCHES = 8, 8, 4
CPU_S = 1.0  # of the controller, per step
GROWTH_MIB = 0.1  # per step; the handles of one step are 50 times that
ONE_DEVICE = (64, 1, 1)  # samples, ranks, engines: what the design costs where nobody needs it
WARM_UP = 3  # steps in which caches and the allocator fill


@dataclass(frozen=True)
class Size:
    samples: int
    ranks: int
    engines: int

    def config(self) -> Config:
        prompts, per_node = self.samples // RESPONSES, min(PER_NODE, self.ranks)
        settings = [
            "actor_rollout_ref.model.path=model",
            "data.train_files=train.parquet",
            "data.max_prompt_length=512",
            "data.max_response_length=8192",
            f"data.train_batch_size={prompts}",
            f"actor_rollout_ref.rollout.n={RESPONSES}",
            f"actor_rollout_ref.rollout.num_engines={self.engines}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // MINI_BATCHES}",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
            "trainer.device=cuda",
            f"trainer.nnodes={self.ranks // per_node}",
            f"trainer.n_gpus_per_node={per_node}",
        ]
        return load(settings)[0].config


NO_RECORD: Any = FunctionSink(lambda record, step: None, lambda: None)


class Controller:
    """The controller of a run, built as `RLBuilder` does, around a simulated cluster."""

    def __init__(self, size: Size) -> None:
        self.size, self.config = size, size.config()
        self.cluster = Cluster()
        self.cluster.count = size.ranks

    async def start(self) -> None:
        config, cluster, console = self.config, self.cluster, RecordingConsole()
        pool: Any = cluster
        ranks = count_train_ranks(config)
        self.policy = PolicyGroup.spawn(pool, ranks, timeouts=timeouts(config))
        self.engines = place_engines(config, pool, "cuda", ["0"] * ranks)
        self.workers = max(1, ranks // RANKS_PER_EPISODE_WORKER)
        self.supervisor = build_supervisor(config, self.engines, RestartTracker(console), shares_devices=True)
        settings = episode_settings(config, {}, self.workers)
        episodes = EpisodePool.spawn(pool, self.workers, settings, self.supervisor.view)
        await asyncio.gather(
            self.policy.start(train_settings(config, 1000, "cuda")),
            episodes.start(),
            *(engine.start() for engine in self.engines),
        )
        client = EpisodeClient(config, episodes, self.supervisor, FailureTracker(0.0, self.size.samples), (0,))
        stream = PromptStream(SequentialSampler(10**9))
        self.buffer = EpisodeBuffer(client.run_group, stream, config.data.train_batch_size)
        probe = Probe.random(150_000, tolerance=1e-3)
        weights = WeightSync(self.policy, self.supervisor, HostTransport(), probe)
        self.supervisor.start(weights.sync_one)
        samples = SampleRecorder(RecordSettings(Path(), None, 0, 0.0), episodes.write_samples, console)
        self.trainer = RLTrainer(
            self.buffer,
            build_planner(config, ranks),
            self.policy,
            weights,
            client,
            None,
            console,
            Throughput(ranks, ranks),
            StepRecords(NO_RECORD, NO_RECORD, samples),
        )
        await self.trainer.begin(0)

    async def train(self, steps: int) -> tuple[list[float], list[float], list[dict[str, float]]]:
        """Return the CPU seconds of each step, the resident MiB after it, and its metrics."""
        seconds, resident, metrics = [], [], []
        process = psutil.Process()
        for version in range(steps):
            start, outside = time.process_time(), self.cluster.outside_s
            metrics.append(await self.trainer.step(version))
            await self.trainer.diagnose(metrics[-1], version + 1)
            seconds.append(time.process_time() - start - (self.cluster.outside_s - outside))
            resident.append(process.memory_info().rss / 2**20)
        return seconds, resident, metrics

    async def close(self) -> None:
        await self.buffer.close()
        await self.supervisor.close()


async def run(size: Size, steps: int) -> tuple[list[float], list[float], list[dict[str, float]]]:
    controller = Controller(size)
    await controller.start()
    try:
        with rare_garbage_collection():  # as the launcher does
            return await controller.train(steps)
    finally:
        await controller.close()


async def count_start(size: Size) -> dict[str, dict[str, float]]:
    """Return what the start of a run sends to each process: calls and bytes."""
    controller = Controller(size)
    await controller.start()
    await controller.close()
    actors = {"train worker": size.ranks, "engine": size.engines, "episode worker": controller.workers}
    cluster = controller.cluster
    buckets = {method: cluster.take_calls("train worker", method) for method in ("pack_bucket", "finish_buckets")}
    return {kind: cluster.per_actor(kind, count) for kind, count in actors.items()} | {"rank 0": buckets}


class _Engine:
    """Replies at once."""

    async def generate(self, token_ids: Any, sampling: SamplingParams) -> Completion:
        await asyncio.sleep(30)
        return Completion([1], np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")

    async def is_ready(self) -> bool:
        return True


async def time_pool(engines: int, requests: int = 1024) -> float:
    """Return the CPU microseconds of a request in the pool of an episode worker."""
    handles: Any = [_Engine() for _ in range(engines)]
    pool = EnginePool(EngineView.of(handles))
    prompts = [[index // RESPONSES, *range(64)] for index in range(requests)]
    start = time.process_time()
    await asyncio.gather(*(pool.generate(prompt, SamplingParams(512)) for prompt in prompts))
    spent = time.process_time() - start
    pool.close()
    return spent / requests * 1e6


def slope(values: list[float]) -> float:
    """Return the growth per step of a straight line through the values."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    spread = sum((index - middle) ** 2 for index in range(len(values)))
    return sum((index - middle) * (value - mean) for index, value in enumerate(values)) / spread


def cost(size: Size, steps: int) -> float:
    """Return the CPU seconds of a step: the median after the first."""
    return median(simulate(run(size, steps + 1))[0][1:])


def exponent(full: float, part: float, factor: float) -> float:
    """Return k of time ~ size^k."""
    return round(math.log(full / part) / math.log(factor), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    random.seed(0)  # of the pools
    size, steps, repeats = Size(16_384, 1024, 256), 100, 5
    if options.short:
        size, steps, repeats = Size(2048, 128, 32), 12, 2
    small, large = (
        simulate(count_start(replace(size, ranks=size.ranks // by, engines=size.engines // by))) for by in (4, 1)
    )
    seconds, resident, metrics = simulate(run(size, steps))
    growth = slope(resident[WARM_UP:])
    cpu_s = median(seconds[1:])
    parts = {
        "samples": replace(size, samples=size.samples // 4),
        "ranks": replace(size, ranks=size.ranks // 4),
        "engines": replace(size, engines=size.engines // 4),
    }
    exponents = {name: exponent(cpu_s, cost(part, repeats), 4) for name, part in parts.items()}
    pools = {engines: round(simulate(time_pool(engines)), 1) for engines in (size.engines // 4, size.engines)}
    per_rank = {name: (small["train worker"][name], large["train worker"][name]) for name in ("calls", "bytes")}
    is_constant = all(few == many or abs(many / few - 1) < 0.01 for few, many in per_rank.values())
    is_constant &= small["rank 0"] == large["rank 0"]
    is_fast = options.short or cpu_s <= CPU_S  # short forms hold no times
    finish(
        "scale",
        is_fast and growth < GROWTH_MIB and is_constant,
        ranks=size.ranks,
        engines=size.engines,
        samples=size.samples,
        steps=steps,
        cpu_s_per_step=round(cpu_s, 3),
        plan_s=round(median(each["timing_s/plan"] for each in metrics), 3),
        exponents=exponents,
        one_device_cpu_ms=round(1e3 * cost(Size(*ONE_DEVICE), repeats), 2),
        resident_mib=round(resident[-1]),
        growth_mib_per_step=round(growth, 4),
        start_per_train_rank={name: [round(each) for each in pair] for name, pair in per_rank.items()},
        start_per_engine={name: [round(each["engine"][name]) for each in (small, large)] for name in per_rank},
        start_per_episode_worker={
            name: [round(each["episode worker"][name]) for each in (small, large)] for name in per_rank
        },
        pool_us_per_request=pools,
    )


if __name__ == "__main__":
    main()
