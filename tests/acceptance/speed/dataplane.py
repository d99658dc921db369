"""The controller handles numbers, never tensors: the samples of a cluster's step pass through the data plane.

16,384 synthetic samples of 4,096 tokens go from fake engines through episode workers, object store, buffer and planner
to two train workers that pull them. Measured in the controller: growth of resident memory (<= 300 MB), time to plan
(<= 1 s), bytes that it receives and sends per sample (<= 1 KB). The same with four times the tokens must change these
by less than 20 %; for planning that is held with micro-batches that grow along, since a planner that must cut four
times as many micro-batches has more to do (`change_plan_same_budget` is that figure). `--short` (CI, on
machines that others use too) takes an eighth of the samples and holds memory and bytes, no times.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import psutil
import ray
from _common import finish

from verl.cluster.actors import ActorGroup
from verl.cluster.hangs.pending_calls import DEFAULT_TIMEOUTS
from verl.cluster.session import connect, disconnect
from verl.config.batch_sizes import BatchSizes
from verl.data.plan import Planner, RankPlan
from verl.data.samplers import PromptStream, ShuffledSampler
from verl.rollout.engine import load_weights
from verl.trainer.buffer.episode_buffer import EpisodeBuffer
from verl.types import Prompt, SampleHandle, SamplingParams, Scored
from verl.workers.episodes import put_sample

GROUP = 8
PROMPT_TOKENS = 64
BUDGET = 65_536


class SyntheticEpisodes:
    """An episode worker whose engine is the fake; everything behind the engine is the real path."""

    def __init__(self) -> None:
        import _common  # noqa: F401 - in the actor's process too, it makes tests/ importable
        from fake_rollout_engine import FakeRolloutEngine

        from verl.agents.episode import EpisodeRunner
        from verl.rollout.engine import EngineView
        from verl.rollout.replica_pool import EnginePool

        async def score(*_: Any) -> Scored:
            return Scored(1.0)

        self._engine = FakeRolloutEngine(32_000)
        self._runner = EpisodeRunner(EnginePool(EngineView.of([self._engine])).generate, score, lambda tokens: "")

    async def start(self) -> None:
        await load_weights(self._engine, [], 0)

    async def run(self, group: int, tokens: int) -> list[SampleHandle]:
        prompt = Prompt(row=group, token_ids=[1] * PROMPT_TOKENS)
        sampling = SamplingParams(max_tokens=tokens - PROMPT_TOKENS)
        return [put_sample(sample) for sample in await self._runner.run(prompt, group, [None] * GROUP, sampling)]


class Puller:
    """A train worker that gets its samples and packs them."""

    def prepare(self, plan: RankPlan) -> int:
        from verl.data.flat_batch import FlatBatch

        total = 0
        for cut in plan.forward:
            total += FlatBatch.from_samples(ray.get([plan.refs[i] for i in cut])).num_tokens
        return total


@dataclass(frozen=True)
class Figures:
    memory_mb: float
    plan_s: float
    bytes_per_sample: float
    tokens_pulled: int
    seconds: float


def planner_of(samples: int, budget: int) -> Planner:
    return Planner(2, BatchSizes(samples // GROUP // 4, None, budget))


def growth_of_planning(few: list[SampleHandle], many: list[SampleHandle], *budgets: int) -> float:
    """How much longer the second batch takes to plan: quickest of each, taken in turns, in this process's own time."""
    planners, best = [planner_of(len(few), budget) for budget in budgets], [float("inf")] * 2
    for turn in range(60):
        start = time.process_time()
        planners[turn % 2].plan((few, many)[turn % 2])
        best[turn % 2] = min(best[turn % 2], time.process_time() - start)
    return best[1] / best[0] - 1


async def measure(samples: int, tokens: int) -> tuple[Figures, list[SampleHandle]]:
    """The figures, and what the controller knew of the samples (without references)."""
    start = time.perf_counter()
    episodes = [ray.remote(SyntheticEpisodes).options(num_cpus=0, max_concurrency=1000).remote() for _ in range(2)]
    workers = [ray.remote(Puller).options(num_cpus=0).remote() for _ in range(2)]
    await asyncio.gather(*(worker.start.remote() for worker in episodes))
    await asyncio.gather(*(worker.run.remote(0, 100) for worker in episodes))
    policy = ActorGroup("train worker", workers)
    gc.collect()
    before = psutil.Process().memory_info().rss
    received = 0

    async def run_group(position: int, row: int) -> list[SampleHandle]:
        nonlocal received
        handles = await episodes[position % 2].run.remote(position, tokens)
        received += len(ray.cloudpickle.dumps(handles))
        return handles

    groups = samples // GROUP
    buffer = EpisodeBuffer(run_group, PromptStream(ShuffledSampler(groups, seed=0)), groups)
    buffer.advance(0)
    handles = await buffer.take(groups)
    planning = time.perf_counter()
    plan = planner_of(samples, BUDGET).plan(handles)
    plan_s = time.perf_counter() - planning
    sent = sum(len(ray.cloudpickle.dumps(rank)) for rank in plan.ranks)
    pulled = sum(await policy.call("prepare", per_rank=plan.ranks, timeout=DEFAULT_TIMEOUTS.train))
    grown = psutil.Process().memory_info().rss - before
    for actor in (*episodes, *workers):
        ray.kill(actor)
    figures = Figures(grown / 1e6, plan_s, (received + sent) / samples, pulled, time.perf_counter() - start)
    return figures, [replace(handle, ref=None) for handle in handles]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    samples = 2_048 if options.short else 16_384
    figures, known = {}, {}
    for tokens in (4_096, 16_384):  # a separate cluster each: no memory of the first run in the second
        connect({"num_cpus": 2})
        figures[tokens], known[tokens] = asyncio.run(measure(samples, tokens))
        disconnect()
        print(f"{samples} samples of {tokens} tokens: {figures[tokens]}", flush=True)
    small, large = figures[4_096], figures[16_384]
    changes = {
        # below 50 MB (the short form) a few MB of the allocator's own would pass for a change
        "memory": (large.memory_mb - small.memory_mb) / max(small.memory_mb, 50.0),
        "plan": growth_of_planning(known[4_096], known[16_384], BUDGET, 4 * BUDGET),
        "bytes": large.bytes_per_sample / small.bytes_per_sample - 1,
    }
    held = changes if not options.short else {name: changes[name] for name in ("memory", "bytes")}
    passed = (
        all(f.memory_mb <= 300 and f.bytes_per_sample <= 1024 for f in figures.values())
        and all(f.plan_s <= 1 or options.short for f in figures.values())
        and all(change < 0.2 for change in held.values())
        and all(f.tokens_pulled == samples * tokens for tokens, f in figures.items())
    )
    finish(
        "dataplane",
        passed,
        samples=samples,
        **{f"memory_mb_{t}": round(f.memory_mb, 1) for t, f in figures.items()},
        **{f"plan_s_{t}": round(f.plan_s, 3) for t, f in figures.items()},
        **{f"bytes_per_sample_{t}": round(f.bytes_per_sample) for t, f in figures.items()},
        **{f"change_{name}": round(change, 3) for name, change in changes.items()},
        change_plan_same_budget=round(growth_of_planning(known[4_096], known[16_384], BUDGET, BUDGET), 3),
        seconds=round(sum(f.seconds for f in figures.values()), 1),
    )


if __name__ == "__main__":
    sys.exit(main())
