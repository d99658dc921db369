"""The RL loop. One step is `Trainer.step`; everything around it decides when to validate, save and stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from verl.data.plan import Plan, Planner
from verl.errors import ProcessLostError, VerlError
from verl.rewards.tally import FailureTally
from verl.tracking.console import Console
from verl.tracking.diagnosis import Diagnosis, is_uniform
from verl.tracking.metrics import Metrics, resident_gib, timer
from verl.tracking.sinks import Sink
from verl.trainer.buffer import EpisodeBuffer
from verl.trainer.evaluate import Evaluator
from verl.trainer.faults import Faults
from verl.trainer.saving import Saver
from verl.trainer.stopping import Stopping
from verl.weights.publish import Publisher

__all__ = ["Timetable", "TrainedPolicy", "Trainer"]


class TrainedPolicy(Protocol):
    """The trained model over all ranks, as the loop needs it."""

    async def prepare(self, plan: Plan) -> dict[str, float]: ...
    async def update(self, plan: Plan) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Timetable:
    """When the loop does what; -1 is never."""

    batch: int
    total_steps: int
    save_every: int = -1
    validate_every: int = -1
    validate_first: bool = True

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
        saver: Saver,
        timetable: Timetable,
        tracker: Sink,
        console: Console,
        tally: FailureTally,
        exhibit: Callable[[str], Awaitable[str]],
        faults: Faults,
        version: int = 0,
    ) -> None:
        self.buffer, self.planner, self.policy, self.weights = buffer, planner, policy, weights
        self.evaluator, self.saver, self.timetable = evaluator, saver, timetable
        self.tracker, self.console, self.version = tracker, console, version
        self.tally, self.exhibit, self.faults, self._diagnosis = tally, exhibit, faults, Diagnosis()

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
                async with self.weights.changing():  # no engine that was lost comes back to weights in between
                    update = await self.policy.update(plan)
            sync = await self.weights.publish(version + 1)  # every engine moves to the new version, and proves it
        whole = {
            "data/position": self.buffer.position,
            "training/staleness": version - min(sample.version for sample in samples),
            "perf/throughput": plan.metrics["plan/tokens"] / times["timing_s/step"],
            "perf/controller_rss_gib": resident_gib(),
        }
        return Metrics.merge(
            self.buffer.metrics(), self.tally.end_step(), plan.metrics, stats, update, sync, times, whole
        )

    async def fit(self, stopping: Stopping | None = None) -> None:
        """Steps until the timetable is done or `stopping` says so, from wherever a checkpoint left off.

        However it ends, what is being written is written to its end, unless the train workers are lost.
        """
        if self.version >= self.timetable.total_steps:
            self.console.note(f"nothing left to do: {self.version} of {self.timetable.total_steps} steps are done")
            return
        try:
            await self._fit(stopping or Stopping())
        except ProcessLostError:
            raise
        except Exception:
            with suppress(VerlError):  # what ended the run comes first
                await self.saver.finish()
            raise

    async def _fit(self, stopping: Stopping) -> None:
        await self.weights.publish(self.version)
        if self.timetable.validate_first:
            await self._validate()
        stopping.begin()
        while self.version < self.timetable.total_steps:
            metrics = await self.step(self.version)
            self.version += 1
            self.tracker.log(metrics | self.faults.metrics(), self.version)
            exhibit = await self.exhibit("train") if is_uniform(metrics) else ""
            self._advise_all(self._diagnosis.advise(metrics, self.version, exhibit))
            if self.timetable.validates_at(self.version):
                await self._validate()
            await self.saver.look()
            reason = stopping.reason(self.saver.longest_s)
            if reason or self.timetable.saves_at(self.version):
                await self.save()
            if reason:
                break
            stopping.stepped()
        await self.saver.finish()
        if self.version < self.timetable.total_steps:
            self.console.note(f"{reason}: saved and ended after step {self.version}; start again to go on")

    async def save(self) -> None:
        """Begin a checkpoint of the current version; it is written beside what comes next."""
        seconds = await self.saver.save(self.version, {"data": self.buffer.state()})
        self.tracker.log({"timing_s/save": seconds}, self.version)

    def _advise_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.console.advice(line)

    async def _validate(self) -> None:
        if self.evaluator is not None:
            means = await self.evaluator.evaluate()
            self.tracker.log(means, self.version)
            self._advise_all([*self.evaluator.warnings, *self._diagnosis.advise_validation(means, self.version)])
