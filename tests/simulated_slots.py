"""Generation and training on a simulated clock, with the real buffer: how long steps take, and who waits.

Engines are slots that write one token per second each, however many are busy; training takes a fixed time. With shared
devices generation stops while the model is trained, and continues where it was.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field

from simulated_clock import simulate

from verl.data.samplers import PromptStream, SequentialSampler
from verl.trainer.buffer.episode_buffer import EpisodeBuffer
from verl.types import SampleHandle


@dataclass(frozen=True)
class Workload:
    """What is generated and trained.

    Args:
        sigma: The spread of response lengths, which are lognormal with a mean of 100 tokens.
        train_s: The seconds of an update on all devices.
        batch: The groups of a step.
        n: The responses of a group.
        slots: The responses that all devices generate at a time.
        longest: The limit of a response in means.
    """

    sigma: float
    train_s: float
    batch: int = 16
    n: int = 4
    slots: int = 64
    longest: float = 12.0

    def length(self, position: int, index: int, seed: int) -> float:
        draw = random.Random(f"{seed} {position} {index}").gauss(0.0, self.sigma)
        return 100.0 * min(math.exp(draw - self.sigma**2 / 2), self.longest)


@dataclass
class Figures:
    """What a run was like."""

    step_s: float
    trainer_waits: float  # share of the time
    slots_busy: float
    staleness_mean: float
    staleness_max: int


@dataclass
class SlotRun:
    """A run of some steps. `share` of the devices generate and the others train; None: all do both, in turn."""

    work: Workload
    staleness: int
    run_ahead: float
    share: float | None = None
    steps: int = 60
    seed: int = 0
    version: int = 0
    busy_s: float = 0.0
    paused_s: float = 0.0  # the time for which generation has stopped so far
    ages: list[int] = field(default_factory=list)

    def run(self) -> Figures:
        return simulate(self._run())

    @property
    def slot_count(self) -> int:
        return max(1, round(self.work.slots * (1.0 if self.share is None else self.share)))

    async def _run(self) -> Figures:
        clock, waited = asyncio.get_running_loop().time, 0.0
        self.free = asyncio.Semaphore(self.slot_count)
        buffer = EpisodeBuffer(
            self._run_group,
            PromptStream(SequentialSampler(10**6)),
            self.work.batch,
            max_staleness=self.staleness,
            run_ahead=self.run_ahead,
        )
        train_s = self.work.train_s if self.share is None else self.work.train_s / (1.0 - self.share)
        for version in range(self.steps):
            self.version = version
            buffer.advance(version)
            asked = clock()
            samples = await buffer.take(self.work.batch)
            waited += clock() - asked
            self.ages += [self.version - sample.version for sample in samples]
            if self.share is None:
                self.paused_s += train_s
            await asyncio.sleep(train_s)
        seconds = clock()
        await buffer.close()
        busy = self.busy_s / (seconds * self.slot_count)
        return Figures(seconds / self.steps, waited / seconds, busy, sum(self.ages) / len(self.ages), max(self.ages))

    async def _run_group(self, position: int, row: int) -> list[SampleHandle]:
        version = self.version

        async def respond(index: int) -> SampleHandle:
            async with self.free:
                left, paused_s = self.work.length(position, index, self.seed), self.paused_s
                self.busy_s += left
                while left > 0:
                    await asyncio.sleep(left)
                    left, paused_s = self.paused_s - paused_s, self.paused_s
            return SampleHandle(None, position, 4, 2, 0.0, version, index=index)

        return list(await asyncio.gather(*(respond(index) for index in range(self.work.n))))
