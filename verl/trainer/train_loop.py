"""Steps until a run is done, whatever a step is: when to validate, to save and to stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from verl.errors import TrainerLostError, WorkerTimeoutError
from verl.tracking.console import Console
from verl.tracking.metrics import Metrics
from verl.tracking.sinks import Sink
from verl.trainer.checkpointing import Checkpointer
from verl.trainer.restarts import RestartTracker
from verl.trainer.shutdown import StopController

__all__ = ["LoopSchedule", "TrainLoop"]


@dataclass(frozen=True, slots=True)
class LoopSchedule:
    """When the loop does what; -1 is never, None after the last step alone."""

    batch: int
    total_steps: int
    save_every: int | None = -1
    validate_every: int = -1
    validate_first: bool = True
    validate_last: bool = False

    def saves_at(self, version: int) -> bool:
        if version == self.total_steps:
            return self.save_every != -1
        return self.save_every is not None and self.save_every > 0 and version % self.save_every == 0

    def validates_at(self, version: int) -> bool:
        if version == self.total_steps:
            return self.validate_every > 0 or self.validate_last
        return self.validate_every > 0 and version % self.validate_every == 0


class TrainLoop(ABC):
    """Owns the version of the weights: it is the number of steps done."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        schedule: LoopSchedule,
        tracker: Sink,
        console: Console,
        restarts: RestartTracker,
        version: int = 0,
    ) -> None:
        self.checkpointer, self.schedule, self.restarts = checkpointer, schedule, restarts
        self.tracker, self.console, self.version = tracker, console, version

    @abstractmethod
    async def step(self, version: int) -> Metrics:
        """From weights of `version` to those of `version + 1`."""

    @abstractmethod
    async def validate(self) -> None:
        """Look at the current weights with held-out data, if there are any, and tell the tracker."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the model: the place in the data."""

    async def begin(self) -> None:  # noqa: B027 - most have nothing to do here
        """Before the first step, and the first validation."""

    async def report(self, metrics: Metrics) -> None:
        """A step is done, and the version is that of its weights."""
        self.tracker.log(metrics | self.restarts.metrics(), self.version)

    async def fit(self, stopping: StopController | None = None) -> None:
        """Steps until the timetable is done or `stopping` says so, from wherever a checkpoint left off.

        However it ends, what is being written is written to its end, as far as the train workers can: a dead one says
        so at once. One that has given no answer would not give this one either, and is not waited for again.
        """
        if self.version >= self.schedule.total_steps:
            self.console.note(f"nothing left to do: {self.version} of {self.schedule.total_steps} steps are done")
            return
        try:
            await self._fit(stopping or StopController())
        except Exception as error:
            if _no_answer(error):
                raise
            with suppress(Exception):  # what ended the run comes first, whatever the others of a dead rank say
                await self.checkpointer.finish()
            raise

    async def _fit(self, stopping: StopController) -> None:
        await self.begin()
        began, reason = self.version, self._reason(stopping)
        if reason is None and self.schedule.validate_first:
            reason = await self._validate(stopping)
        stopping.begin()
        while reason is None and self.version < self.schedule.total_steps:
            metrics = await self.step(self.version)
            self.version += 1
            await self.report(metrics)
            await self.checkpointer.poll()
            stopping.record_step()
            reason = self._reason(stopping)
            if reason is None and self.schedule.validates_at(self.version):
                reason = await self._validate(stopping)
            if reason or self.schedule.saves_at(self.version):
                await self.save()
        await self.checkpointer.finish()
        if reason:
            ended = (
                f"saved and ended after step {self.version}" if self.version > began else "ended before the first step"
            )
            self.console.note(f"{reason}: {ended}; start again to go on")

    def _reason(self, stopping: StopController) -> str | None:
        done = self.version == self.schedule.total_steps  # what is finished is not stopped
        return None if done else stopping.reason(self.checkpointer.longest_s)

    async def _validate(self, stopping: StopController) -> str | None:
        """Validate, and ask again. A save that is due comes afterwards, so that a run that resumes has validated what
        it resumes from; but who asks a run to end may not wait for a validation, so that breaks it off."""
        if not await stopping.run_unless_stopped(self.validate):
            self.console.note(f"asked to end: the validation after step {self.version} is left out")
        return self._reason(stopping)

    async def save(self) -> None:
        """Begin a checkpoint of the current version; it is written beside what comes next."""
        seconds = await self.checkpointer.save(self.version, self.state())
        self.tracker.log({"timing_s/save": seconds}, self.version)

    def _advise_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.console.advice(line)


def _no_answer(error: Exception) -> bool:
    return isinstance(error.__cause__ if isinstance(error, TrainerLostError) else error, WorkerTimeoutError)
