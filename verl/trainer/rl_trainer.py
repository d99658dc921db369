"""The RL loop. One step is `RLTrainer.step`; `fitting` decides when to validate, save and stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from verl.data.plan import Plan, Planner
from verl.rewards.failures import FailureTracker
from verl.tracking.console import Console
from verl.tracking.diagnosis import Diagnosis, is_uniform
from verl.tracking.metrics import Metrics, resident_gib, timer
from verl.tracking.sinks import Sink
from verl.trainer.buffer import EpisodeBuffer
from verl.trainer.checkpointing import Checkpointer
from verl.trainer.evaluator import Evaluator
from verl.trainer.restarts import RestartTracker
from verl.trainer.train_loop import LoopSchedule, TrainLoop
from verl.weights.sync import WeightSync

__all__ = ["LoopSchedule", "RLTrainer", "TrainedPolicy"]


class TrainedPolicy(Protocol):
    """The trained model over all ranks, as the loop needs it."""

    async def prepare(self, plan: Plan) -> dict[str, float]: ...
    async def update(self, plan: Plan) -> dict[str, float]: ...


class RLTrainer(TrainLoop):
    """Owns the version of the weights: it is the number of steps done. Consumes finished groups, produces versions."""

    def __init__(
        self,
        buffer: EpisodeBuffer,
        planner: Planner,
        policy: TrainedPolicy,
        weights: WeightSync,
        evaluator: Evaluator | None,
        checkpointer: Checkpointer,
        schedule: LoopSchedule,
        tracker: Sink,
        console: Console,
        tally: FailureTracker,
        preview: Callable[[str], Awaitable[str]],
        restarts: RestartTracker,
        version: int = 0,
    ) -> None:
        super().__init__(checkpointer, schedule, tracker, console, restarts, version)
        self.buffer, self.planner, self.policy, self.weights = buffer, planner, policy, weights
        self.evaluator, self.tally, self.preview, self._diagnosis = evaluator, tally, preview, Diagnosis()

    async def step(self, version: int) -> Metrics:
        """One RL step: answers of `version` in, weights of `version + 1` in every engine out."""
        times = Metrics()
        with timer(times, "step"):
            self.buffer.advance(version)  # episodes start, as many as max_staleness allows
            with timer(times, "gen"):
                samples = await self.buffer.take(self.schedule.batch)
                self._advise_all(self.buffer.warnings)
            with timer(times, "plan"):
                plan = self.planner.plan(samples)  # balance tokens over ranks, cut mini-batches
                self._advise_all(plan.warnings)
            with timer(times, "prep"):
                stats = await self.policy.prepare(plan)  # old/ref log-probs, advantages: they stay on the workers
            with timer(times, "update"):
                async with self.weights.updating():  # no engine that was lost comes back to weights in between
                    update = await self.policy.update(plan)
            sync = await self.weights.sync(version + 1)  # every engine moves to the new version, and proves it
        whole = {
            "data/position": self.buffer.position,
            "training/staleness": version - min(sample.version for sample in samples),
            "perf/throughput": plan.metrics["plan/tokens"] / times["timing_s/step"],
            "perf/controller_rss_gib": resident_gib(),
        }
        return Metrics.merge(
            self.buffer.metrics(), self.tally.end_step(), plan.metrics, stats, update, sync, times, whole
        )

    async def begin(self) -> None:
        await self.weights.sync(self.version)

    async def report(self, metrics: Metrics) -> None:
        await super().report(metrics)
        preview = await self.preview("train") if is_uniform(metrics) else ""
        self._advise_all(self._diagnosis.advise(metrics, self.version, preview))

    async def validate(self) -> None:
        if self.evaluator is not None:
            means = await self.evaluator.evaluate()
            self.tracker.log(means, self.version)
            self._advise_all([*self.evaluator.warnings, *self._diagnosis.advise_validation(means, self.version)])

    def state(self) -> dict[str, Any]:
        return {"data": self.buffer.state()}
