"""Reinforcement learning: the step (`RLTrainer.step`), validation and advice. `train_loop` decides when each is due."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from verl.data.plan import Planner
from verl.diagnosis.diagnosis import Diagnosis
from verl.diagnosis.reward_rules import is_uniform
from verl.diagnosis.rule import Advice
from verl.tracking.console import Console
from verl.tracking.metrics import Metrics, resident_gib, timer
from verl.tracking.phases import PHASES, PhaseTimes
from verl.tracking.throughput import Throughput
from verl.trainer.buffer.episode_buffer import EpisodeBuffer
from verl.trainer.buffer.report import describe_staleness
from verl.trainer.evaluator import Evaluator
from verl.trainer.records.step import StepRecords
from verl.trainer.train_loop import Validation
from verl.weights.sync import WeightSync
from verl.workers.episode_pool import EpisodeClient
from verl.workers.train import PolicyGroup

_PHASES = {
    "gen": "generating",
    "plan": "planning",
    "sleep": "freeing the engines' memory",
    "prepare": "computing log-probs and advantages",
    "update": "updating the model",
}


_SENDING = "sending the weights to the engines"


class RLTrainer:
    """The task of an RL run. Consumes finished groups of samples, produces versions of the weights."""

    def __init__(
        self,
        buffer: EpisodeBuffer,
        planner: Planner,
        policy: PolicyGroup,
        weights: WeightSync,
        episodes: EpisodeClient,
        evaluator: Evaluator | None,
        console: Console,
        throughput: Throughput,
        records: StepRecords,
        saves_at: Callable[[int], bool] = lambda version: False,
    ) -> None:
        self.buffer, self.planner, self.policy, self.weights = buffer, planner, policy, weights
        self.episodes, self.evaluator, self.console = episodes, evaluator, console
        self._throughput, self._records, self._times = throughput, records, PhaseTimes()
        self._saves_at = saves_at
        self._diagnosis = Diagnosis()
        self._weights_version: int | None = None  # version in the train workers; None during an update

    async def step(self, version: int) -> Metrics:
        """One RL step: samples of `version` in, weights of `version + 1` in every engine out."""
        times = Metrics()
        self.episodes.begin_step()
        with timer(times, "step"):
            self.buffer.advance(version)  # episodes start, as many as max_staleness allows
            with self._phase(times, "gen"):
                samples = await self.buffer.take(self.buffer.batch)
                self._advise(self.buffer.warnings)
            with self._phase(times, "plan"):
                plan = self.planner.plan(samples)  # balance tokens over ranks, cut mini-batches
                self._advise(plan.warnings)
            with self._phase(times, "sleep"):
                await self.weights.free_devices()  # engines sleep, where they share devices with the trainer
            with self._phase(times, "prepare"):
                if self._records.replay is not None:
                    await self._records.replay.begin(version + 1, plan)
                stats = await self.policy.prepare(plan)  # old/ref log-probs, advantages: they stay on the workers
                self._records.samples.record_trained(version + 1, samples, plan, self.policy.read_tokens)
            with self._phase(times, "update"):
                async with self.weights.updating():  # no engine rejoins while the weights change
                    self._weights_version = None
                    update = await self.policy.update()
                    self._weights_version = version + 1
                if self._saves_at(version + 1):
                    await self.policy.check()  # now, because it takes memory: engines are awake during the save
            if self._records.replay is not None:
                self._records.replay.finish(version + 1, {**stats, **update})
            with self._times.measure("sync"), self.console.stage(_SENDING, is_logged=False):
                sync = await self.weights.sync(version + 1)  # every engine moves to the new version, and proves it
            self.buffer.discard_from(self.weights.outliers)
        self._records.trained.log(self.buffer.record, version + 1)
        self._records.phases.log({PHASES: [*self._times.take(), *self.policy.take_phases()]}, version + 1)
        whole = {
            "data/position": self.buffer.position,
            "perf/controller_rss_gib": resident_gib(),
            "perf/samples_skipped": self._records.samples.skipped,
            **describe_staleness(samples, version),
            **self._throughput.measure(plan.metrics, times, self.buffer.idle.read()),
        }
        failures = self.episodes.failures.end_step()
        return Metrics.merge(self.buffer.metrics, failures, plan.metrics, stats, update, sync, times, whole)

    async def begin(self, version: int) -> None:
        self._weights_version = version
        if version:
            self._records.trained.log({"resumed": True, **self.buffer.progress()}, version)
        with self.console.stage(_SENDING, is_logged=False):
            await self.weights.sync(version)
        self.policy.take_phases()  # they belong to no step

    async def diagnose(self, metrics: Metrics, version: int) -> list[Advice]:
        preview = await self.episodes.preview("train") if is_uniform(metrics) else ""
        return self._diagnosis.advise(metrics, version, preview)

    async def validate(self, version: int) -> Validation | None:
        if self.evaluator is None:
            return None
        progress = partial(self.episodes.measure_progress, "val")
        with self._times.measure("val"), self.console.stage("validating", progress, is_logged=False):
            record = partial(self._records.samples.record_validation, version)
            means = await self.evaluator.evaluate(record)
        warnings = [Advice(text) for text in self.evaluator.warnings]
        return Validation(means, [*warnings, *self._diagnosis.advise(means, version)])

    async def prepare_save(self, version: int) -> None:
        if not self._saves_at(version):
            await self.weights.free_devices()  # for good: the run ends after a save that is not due

    def state(self, version: int) -> dict[str, Any]:
        return {"data": self.buffer.state()}

    def has_weights(self, version: int) -> bool:
        return self._weights_version == version

    @contextmanager
    def _phase(self, times: Metrics, name: str) -> Iterator[None]:
        """Time a phase of the step, and show it on a terminal."""
        progress = partial(self.episodes.measure_progress, "train") if name == "gen" else str
        stage = self.console.stage(_PHASES[name], progress, is_logged=False)
        with timer(times, name), self._times.measure(name), stage:
            yield

    def _advise(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.console.advice(line)
