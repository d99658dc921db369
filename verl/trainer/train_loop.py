"""The training loop: repeats the step of a task until the run is done, and decides when to validate, save and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from verl.diagnosis.rule import Advice
from verl.errors import StorageError, TrainerLostError, WorkerTimeoutError
from verl.tracking.console import Console
from verl.tracking.metrics import Metrics
from verl.tracking.sink import Sink
from verl.trainer.checkpointing import Checkpointer
from verl.trainer.profiling import RunProfiler
from verl.trainer.restarts import RestartTracker
from verl.trainer.shutdown import StopController


@dataclass(frozen=True, slots=True)
class LoopSchedule:
    """When the loop validates and saves. An interval of -1 is never; None, only after the last step."""

    batch: int
    total_steps: int
    save_every: int | None = -1
    validate_every: int = -1
    validate_first: bool = True
    validate_last: bool = False
    trains: bool = True  # or only validates, once

    def saves_at(self, version: int) -> bool:
        if version == self.total_steps:
            return self.save_every != -1
        return self.save_every is not None and self.save_every > 0 and version % self.save_every == 0

    def validates_at(self, version: int) -> bool:
        if version == self.total_steps:
            return self.validate_every > 0 or self.validate_last
        return self.validate_every > 0 and version % self.validate_every == 0


@dataclass(frozen=True, slots=True)
class Validation:
    """The metrics of a validation, and advice for the user."""

    metrics: Mapping[str, float]
    advice: list[Advice]


class TrainTask(Protocol):
    """What the loop repeats. `version` is the version of the weights: the number of steps done."""

    async def begin(self, version: int) -> None:
        """Get ready for the first step and the first validation."""

    async def step(self, version: int) -> Metrics:
        """Train from weights of `version` to those of `version + 1`."""

    async def diagnose(self, metrics: Metrics, version: int) -> list[Advice]:
        """Return advice for the user about a step that has led to `version`."""

    async def validate(self, version: int) -> Validation | None:
        """Validate the current weights; None without validation data."""

    async def prepare_save(self, version: int) -> None:
        """Make room on the devices for a save. If the schedule has none at `version`, the run ends after it."""

    def state(self, version: int) -> dict[str, Any]:
        """Return what a checkpoint holds in addition to the model: the position in the data."""

    def has_weights(self, version: int) -> bool:
        """Return whether the trained weights are certainly those of `version`, after a step that failed."""


KeepWeights = Callable[[asyncio.Future[None]], None]
"""Called with a validation: no weights are replaced before it is done."""
T_co = TypeVar("T_co", bound=TrainTask, covariant=True)


class TrainLoop(Generic[T_co]):
    """Repeats the step of a task. Owns the version of the weights."""

    def __init__(
        self,
        task: T_co,
        schedule: LoopSchedule,
        checkpointer: Checkpointer,
        tracker: Sink,
        console: Console,
        restarts: RestartTracker,
        version: int = 0,
        profiler: RunProfiler | None = None,
        keep_weights: KeepWeights | None = None,
    ) -> None:
        """With `keep_weights`, validations run during the next step; without, the step waits for them."""
        self.task, self.schedule, self.checkpointer, self.profiler = task, schedule, checkpointer, profiler
        self.tracker, self.console, self.restarts, self.version = tracker, console, restarts, version
        self._first = version  # the version that the run has started from
        self._state: dict[str, Any] | None = None  # state of the task before the step in progress; None between steps
        self._keep_weights = keep_weights
        self._validation: asyncio.Future[None] | None = None

    async def fit(self, stop: StopController | None = None) -> None:
        """Run from the current version to the end of the schedule, or until `stop` says so.

        If a step fails, a checkpoint that is being written is finished first. Except after a timeout: a train worker
        that did not reply would not reply to this call either. If the object store is full, the run saves first.
        """
        if self.schedule.trains and self.version >= self.schedule.total_steps:
            self.console.note(f"nothing left to do: {self.version} of {self.schedule.total_steps} steps are done")
            return
        try:
            with self.console.panel():
                await self._fit(stop or StopController())
        except Exception as error:
            if _is_timeout(error):
                raise
            with suppress(Exception):  # must not hide the error that ended the run
                await self.checkpointer.poll()  # fails if ranks wait in a collective for the one that has failed
                await self.checkpointer.finish()
                if isinstance(error, StorageError):
                    await self._save_before_exit()
            raise
        finally:
            await self._cancel_validation()

    async def save(self) -> None:
        """Start a checkpoint of the current version; it is written in the background."""
        is_last = self.version == self.schedule.total_steps
        await self.task.prepare_save(self.version)
        seconds = await self.checkpointer.save(self.version, self.task.state(self.version), is_last=is_last)
        self.tracker.log({"timing_s/save": seconds}, self.version)

    async def _fit(self, stop: StopController) -> None:
        await self.task.begin(self.version)
        first, reason = self.version, self._stop_reason(stop)
        if reason is None and self.schedule.validate_first:
            await self._validate(stop, self.version)
            reason = self._stop_reason(stop)
        stop.begin()
        while self.schedule.trains and reason is None and self.version < self.schedule.total_steps:
            await self._step()
            await self._finish_validation()
            await self.checkpointer.poll()
            stop.record_step()
            reason = self._stop_reason(stop)
            if reason is None and self.schedule.validates_at(self.version):
                await self._start_validation(stop)
                reason = self._stop_reason(stop)
            if reason or self.schedule.saves_at(self.version):
                await self.save()
        with self.console.stage("saving", is_logged=False):
            await self.checkpointer.finish()
        if reason:
            done = "stopped before the first step"
            if self.version > first:
                done = f"saved and stopped after step {self.version}"
            self.console.note(f"{reason}: {done}; rerun the command to resume")

    async def _save_before_exit(self) -> None:
        """Save the weights after the last complete step, unless they are saved, or were being changed."""
        is_new = self.version not in (self.checkpointer.last, self._first)
        if self.schedule.save_every != -1 and is_new and self.task.has_weights(self.version):
            await self.task.prepare_save(self.version)
            state = self.task.state(self.version) if self._state is None else self._state
            await self.checkpointer.save(self.version, state)
            await self.checkpointer.finish()

    async def _step(self) -> None:
        self._state = self.task.state(self.version)
        async with nullcontext() if self.profiler is None else self.profiler.recording(self.version + 1):
            with self.console.running_step(self.version + 1):
                metrics = await self.task.step(self.version)
        self.version += 1
        self._state = None  # a validation that fails comes after the step
        self.tracker.log(metrics | self.restarts.metrics(), self.version)
        self._advise(await self.task.diagnose(metrics, self.version))

    async def _start_validation(self, stop: StopController) -> None:
        """Validate, if possible beside the next step. Otherwise a save that is due comes later, so that a resumed run
        has validated the version it resumes from."""
        self._validation = asyncio.ensure_future(self._validate(stop, self.version))
        if self._keep_weights is None or self.version == self.schedule.total_steps:
            await self._finish_validation()
        else:
            self._keep_weights(self._validation)

    async def _validate(self, stop: StopController, version: int) -> None:
        """Validate, unless or until the run is asked to stop."""
        if not await stop.run_unless_stopped(partial(self._run_validation, version)):
            self.console.note(f"asked to stop: skipped the validation after step {version}")

    async def _run_validation(self, version: int) -> None:
        if (validation := await self.task.validate(version)) is not None:
            self.tracker.log(validation.metrics, version)
            self._advise(validation.advice)

    async def _finish_validation(self) -> None:
        if self._validation is not None:
            await self._validation
            self._validation = None

    async def _cancel_validation(self) -> None:
        if self._validation is not None:
            self._validation.cancel()
            await asyncio.gather(self._validation, return_exceptions=True)

    def _stop_reason(self, stop: StopController) -> str | None:
        is_done = self.version == self.schedule.total_steps
        return None if is_done else stop.reason(self.checkpointer.longest_s)

    def _advise(self, advice: Iterable[Advice]) -> None:
        for each in advice:
            self.console.advice(each.text, each.rule)


def _is_timeout(error: Exception) -> bool:
    return isinstance(error.__cause__ if isinstance(error, TrainerLostError) else error, WorkerTimeoutError)
