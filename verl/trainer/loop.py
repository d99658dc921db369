"""The RL loop. One step is `Trainer.step`; everything around it decides when to validate, save and stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from verl.checkpoint.manifest import CheckpointDir
from verl.data.plan import Plan, Planner
from verl.rewards.tally import FailureTally
from verl.tracking.console import Console
from verl.tracking.diagnosis import Diagnosis, is_uniform
from verl.tracking.metrics import Metrics, resident_gib, timer
from verl.tracking.sinks import Sink
from verl.trainer.buffer import EpisodeBuffer
from verl.trainer.evaluate import Evaluator
from verl.weights.publish import Publisher

__all__ = ["Timetable", "TrainedPolicy", "Trainer"]


class TrainedPolicy(Protocol):
    """The trained model over all ranks, as the loop needs it."""

    async def prepare(self, plan: Plan) -> dict[str, float]: ...
    async def update(self, plan: Plan) -> dict[str, float]: ...
    async def save(self, directory: str) -> None: ...
    async def load(self, directory: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Timetable:
    """When the loop does what; -1 is never."""

    batch: int
    total_steps: int
    save_every: int = -1
    validate_every: int = -1
    validate_first: bool = True
    keep_checkpoints: int | None = None

    def saves_at(self, version: int) -> bool:
        return self.save_every > 0 and (version % self.save_every == 0 or version == self.total_steps)

    def validates_at(self, version: int) -> bool:
        return self.validate_every > 0 and (version % self.validate_every == 0 or version == self.total_steps)


class Trainer:
    """Owns the version of the weights: it is the number of steps done. Consumes finished groups, produces versions."""

    def __init__(
        self,
        buffer: EpisodeBuffer,
        planner: Planner,
        policy: TrainedPolicy,
        weights: Publisher,
        evaluator: Evaluator | None,
        checkpoints: CheckpointDir,
        timetable: Timetable,
        tracker: Sink,
        console: Console,
        tally: FailureTally,
        exhibit: Callable[[str], Awaitable[str]],
        version: int = 0,
    ) -> None:
        self.buffer, self.planner, self.policy, self.weights = buffer, planner, policy, weights
        self.evaluator, self.checkpoints, self.timetable = evaluator, checkpoints, timetable
        self.tracker, self.console, self.version = tracker, console, version
        self.tally, self.exhibit, self._diagnosis = tally, exhibit, Diagnosis()

    async def step(self, version: int) -> Metrics:
        """One RL step: answers of `version` in, weights of `version + 1` in every engine out."""
        times = Metrics()
        with timer(times, "step"):
            self.buffer.advance(version)  # episodes start, as many as max_staleness allows
            with timer(times, "gen"):
                samples = await self.buffer.take(self.timetable.batch)
                self._advise_all(self.buffer.warnings)
            with timer(times, "plan"):
                plan = self.planner.plan(samples)  # balance tokens over ranks, cut mini-batches
                self._advise_all(plan.warnings)
            with timer(times, "prep"):
                stats = await self.policy.prepare(plan)  # old/ref log-probs, advantages: they stay on the workers
            with timer(times, "update"):
                update = await self.policy.update(plan)
            sync = await self.weights.publish(version + 1)  # every engine moves to the new version, and proves it
        whole = {
            "training/staleness": version - min(sample.version for sample in samples),
            "perf/throughput": plan.metrics["plan/tokens"] / times["timing_s/step"],
            "perf/controller_rss_gib": resident_gib(),
        }
        return Metrics.merge(
            self.buffer.metrics(), self.tally.end_step(), plan.metrics, stats, update, sync, times, whole
        )

    async def fit(self) -> None:
        """Steps until the timetable is done, from wherever a checkpoint left off."""
        if self.version >= self.timetable.total_steps:
            self.console.note(f"nothing left to do: {self.version} of {self.timetable.total_steps} steps are done")
            return
        await self.weights.publish(self.version)
        if self.timetable.validate_first:
            await self._validate()
        while self.version < self.timetable.total_steps:
            metrics = await self.step(self.version)
            self.version += 1
            self.tracker.log(metrics, self.version)
            exhibit = await self.exhibit("train") if is_uniform(metrics) else ""
            self._advise_all(self._diagnosis.advise(metrics, self.version, exhibit))
            if self.timetable.validates_at(self.version):
                await self._validate()
            if self.timetable.saves_at(self.version):
                await self.save()

    async def save(self) -> Path:
        """A checkpoint of the current version: complete, or not there."""
        directory = self.checkpoints.begin(self.version)
        await self.policy.save(str(directory))
        self.checkpoints.commit(self.version, {"data": self.buffer.state()})
        self.checkpoints.prune(self.timetable.keep_checkpoints)
        self.console.note(f"saved {directory}")
        return directory

    def _advise_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.console.advice(line)

    async def _validate(self) -> None:
        if self.evaluator is not None:
            means = await self.evaluator.evaluate()
            self.tracker.log(means, self.version)
            self._advise_all([*self.evaluator.warnings, *self._diagnosis.advise_validation(means, self.version)])
