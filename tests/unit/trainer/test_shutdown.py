"""Stopping before the last step: on SIGTERM, or before a time limit."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from verl.errors import ProcessLostError, TrainerLostError, WorkerTimeoutError
from verl.trainer.restarts import RestartTracker
from verl.trainer.shutdown import OUT_OF_TIME, TERMINATED, StopController
from verl.trainer.train_loop import LoopSchedule, TrainLoop

pytestmark = pytest.mark.unit


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def stepping(stopping: StopController, clock: Clock, *durations: float) -> None:
    stopping.begin()
    for seconds in durations:
        clock.now += seconds
        stopping.record_step()


def test_another_step_is_begun_only_if_the_longest_step_and_save_fit() -> None:
    clock = Clock()
    stopping = StopController(clock.now + 100, "the end", margin_s=10, clock=clock)
    stepping(stopping, clock, 30, 5)  # 65 s are left; 30 + 20 + 10 are needed
    assert stopping.reason(20) is None
    assert stopping.exit_code == 0
    clock.now += 6
    reason = stopping.reason(20)
    assert reason is not None
    assert "59 s are left until the end, and another step could need 60 s" in reason
    assert stopping.exit_code == OUT_OF_TIME


@pytest.mark.parametrize(
    ("hours", "slurm", "limit"),
    [
        (None, "", None),
        (2.0, "", "trainer.max_hours=2"),
        (None, "5000", "the end of the Slurm job"),
        (1.0, "4000", "the end of the Slurm job"),
        (1.0, "9000", "trainer.max_hours=1"),
        (None, "soon", None),
    ],
)
def test_the_earlier_time_limit_counts(hours: float | None, slurm: str, limit: str | None) -> None:
    clock = Clock()
    stopping = StopController.by_time(hours, 60, {"SLURM_JOB_END_TIME": slurm}, clock)
    assert stopping.reason() is None
    stepping(stopping, clock, 1e6)
    reason = stopping.reason()
    assert (reason is None) == (limit is None)
    assert limit is None or limit in str(reason)


def test_the_time_of_a_restart_does_not_count_as_a_step() -> None:
    clock = Clock()
    stopping = StopController(clock.now + 1000, "the end", clock=clock)
    stepping(stopping, clock, 10)
    clock.now += 500
    stepping(stopping, clock, 10)
    assert stopping.describe_limit() == "the run saves and stops in time for the end, in 0.13 hours"
    clock.now += 465
    assert stopping.reason() is None
    clock.now += 10
    assert stopping.reason() is not None


async def test_sigterm_stops_after_the_step_and_a_second_one_at_once() -> None:
    clock = Clock()
    stopping = StopController(clock=clock)
    with stopping.on_sigterm(print):
        assert stopping.reason() is None
        os.kill(os.getpid(), signal.SIGTERM)
        while stopping.reason() is None:
            await asyncio.sleep(0)
        assert stopping.reason() == "asked to stop (SIGTERM)"
        assert stopping.exit_code == TERMINATED == 143
        os.kill(os.getpid(), signal.SIGTERM)  # the same request: `timeout` signals the process and its group
        for _ in range(100):
            await asyncio.sleep(0.001)
        clock.now += 2
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


class Recorder:
    """Everything around the loop: remembers what it was asked for."""

    def __init__(self) -> None:
        self.saves: list[int] = []
        self.finished = 0
        self.longest_s = 0.0
        self.notes: list[str] = []

    async def save(self, version: int, trainer: dict[str, Any], *, is_last: bool = False) -> float:
        self.saves.append(version)
        return 0.0

    async def poll(self) -> None:
        pass

    async def finish(self) -> None:
        self.finished += 1

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stage(self, name: str, *progress: Any, **options: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def panel(self) -> AbstractContextManager[None]:
        return nullcontext()

    def running_step(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def log(self, metrics: dict[str, float], step: int) -> None:
        pass


class Stepping:
    """A task. Its step takes `seconds` of the clock; a signal arrives in the step of `signalled`."""

    def __init__(
        self, around: Recorder, clock: Clock, seconds: float, stopping: StopController, signalled: int = -1
    ) -> None:
        seen: Any = around
        self.loop = TrainLoop(self, LoopSchedule(1, 10), seen, seen, seen, RestartTracker(seen))
        self.clock, self.seconds, self.stopping, self.signalled = clock, seconds, stopping, signalled
        self.validated: list[int] = []
        self.prepared: list[int] = []
        self.during_validation: Callable[[], None] = lambda: None

    async def begin(self, version: int) -> None: ...
    async def prepare_save(self, version: int) -> None:
        self.prepared.append(version)

    async def diagnose(self, metrics: Any, version: int) -> list[Any]:
        return []

    def state(self, version: int) -> dict[str, Any]:
        return {}

    async def validate(self, version: int) -> None:
        self.during_validation()
        for _ in range(10):
            await asyncio.sleep(0)
        self.validated.append(version)

    async def step(self, version: int) -> Any:
        self.clock.now += self.seconds
        if version == self.signalled:
            self.stopping.request_stop()
        return {}


async def test_the_devices_are_made_free_before_every_save() -> None:
    around, stopping, clock = Recorder(), StopController(), Clock()
    stepping = Stepping(around, clock, 1, stopping, signalled=3)
    await stepping.loop.fit(stopping)
    assert stepping.prepared == around.saves == [4]


async def test_a_run_that_is_asked_to_stop_saves_even_with_save_freq_minus_one() -> None:
    around, stopping, clock = Recorder(), StopController(), Clock()
    await Stepping(around, clock, 1, stopping, signalled=3).loop.fit(stopping)
    assert around.saves == [4]
    assert around.finished == 1
    assert around.notes == ["asked to stop (SIGTERM): saved and stopped after step 4; rerun the command to resume"]


async def test_a_run_stops_before_its_time_limit() -> None:
    around, clock = Recorder(), Clock()
    around.longest_s = 5.0
    stopping = StopController(clock.now + 100, "the end", margin_s=10, clock=clock)
    await Stepping(around, clock, 20, stopping).loop.fit(stopping)
    # After 4 steps 20 s are left, and 35 are needed; after 3 it was 40.
    assert around.saves == [4]
    assert stopping.exit_code == OUT_OF_TIME


async def test_the_last_step_counts_as_the_longest() -> None:
    around, clock = Recorder(), Clock()
    stopping = StopController(clock.now + 100, "the end", margin_s=10, clock=clock)
    await Stepping(around, clock, 60, stopping).loop.fit(stopping)
    assert around.saves == [1], "another step of 60 s does not end within the 40 that are left"
    assert stopping.exit_code == OUT_OF_TIME


def test_the_longest_save_is_remembered_after_a_restart() -> None:
    clock = Clock()
    stopping = StopController(clock.now + 100, "the end", margin_s=10, clock=clock)
    stepping(stopping, clock, 30)
    assert stopping.reason(20) is None
    clock.now += 15  # a restart, whose saver has seen no save yet
    reason = stopping.reason(0)
    assert reason is not None
    assert "another step could need 60 s (the longest so far took 30 s, a checkpoint 20 s" in reason


async def test_a_run_that_reaches_its_last_step_ends_normally() -> None:
    around, clock, stopping = Recorder(), Clock(), StopController()
    await Stepping(around, clock, 1, stopping).loop.fit(stopping)
    assert (around.saves, around.notes, around.finished, stopping.exit_code) == ([], [], 1, 0)


@pytest.mark.parametrize(
    ("error", "finished"),
    [
        (ValueError("a reward function"), 1),
        (ProcessLostError("episode worker 0: run: its process has died"), 1),
        (WorkerTimeoutError("waited 3600 s for train worker 0 to update"), 0),
        (TrainerLostError("train worker 0: pack_weights: its process has died"), 1),
    ],
)
async def test_a_run_that_fails_finishes_the_checkpoint_that_is_being_written(error: Exception, finished: int) -> None:
    around, clock, stopping = Recorder(), Clock(), StopController()
    task = Stepping(around, clock, 1, stopping)

    async def fails(version: int) -> Any:
        raise error

    task.step = fails  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        await task.loop.fit(stopping)
    assert around.finished == finished


async def test_after_a_timeout_of_a_train_worker_the_run_does_not_wait_for_it_again() -> None:
    around, clock, stopping = Recorder(), Clock(), StopController()
    task = Stepping(around, clock, 1, stopping)

    async def fails(version: int) -> Any:
        raise TrainerLostError("no answer") from WorkerTimeoutError("no answer")

    task.step = fails  # type: ignore[method-assign]
    with pytest.raises(TrainerLostError):
        await task.loop.fit(stopping)
    assert around.finished == 0


async def test_a_run_does_not_wait_for_train_workers_that_wait_for_the_one_that_failed() -> None:
    around, clock, stopping = Recorder(), Clock(), StopController()
    task = Stepping(around, clock, 1, stopping)

    async def fails(version: int) -> Any:
        async def poll() -> None:
            raise WorkerTimeoutError("train worker 0 waits in a collective")

        around.poll = poll  # type: ignore[method-assign]
        raise ValueError("the error of train worker 1")

    task.step = fails  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="train worker 1"):
        await task.loop.fit(stopping)
    assert around.finished == 0


@pytest.mark.parametrize("second", [ProcessLostError, RuntimeError])
async def test_dead_train_workers_do_not_hide_the_root_cause(second: type[Exception]) -> None:
    around, clock, stopping = Recorder(), Clock(), StopController()
    task = Stepping(around, clock, 1, stopping)

    async def fails(*_: Any) -> Any:
        raise ProcessLostError("train worker 1: update: its process has died")

    async def fails_too() -> None:
        raise second("train worker 0: saved: connection closed by peer")

    task.step = fails  # type: ignore[method-assign]
    around.finish = fails_too  # type: ignore[method-assign]
    with pytest.raises(ProcessLostError, match="update"):
        await task.loop.fit(stopping)


async def test_a_run_that_is_asked_to_stop_saves_without_validating() -> None:
    around, stopping, clock = Recorder(), StopController(), Clock()
    task = Stepping(around, clock, 1, stopping, signalled=3)
    task.loop.schedule = LoopSchedule(1, 10, validate_every=2)
    await task.loop.fit(stopping)
    assert (around.saves, task.validated) == ([4], [0, 2])


async def test_a_run_out_of_time_saves_without_validating() -> None:
    around, clock = Recorder(), Clock()
    stopping = StopController(clock.now + 100, "the end", margin_s=10, clock=clock)
    task = Stepping(around, clock, 20, stopping)
    task.loop.schedule = LoopSchedule(1, 10, validate_every=4)
    await task.loop.fit(stopping)  # after 4 steps 20 s are left, and 30 are needed
    assert (around.saves, task.validated) == ([4], [0])


async def test_a_signal_cancels_a_validation() -> None:
    around, stopping, clock = Recorder(), StopController(), Clock()
    task = Stepping(around, clock, 1, stopping)
    task.loop.schedule = LoopSchedule(1, 10, validate_every=4, validate_first=False)
    task.during_validation = stopping.request_stop
    await task.loop.fit(stopping)
    assert (around.saves, task.validated, task.loop.version) == ([4], [], 4)
    assert around.notes == [
        "asked to stop: skipped the validation after step 4",
        "asked to stop (SIGTERM): saved and stopped after step 4; rerun the command to resume",
    ]


async def test_a_signal_cancels_a_validation_beside_a_step() -> None:
    around, stopping, clock = Recorder(), StopController(), Clock()
    task = Stepping(around, clock, 1, stopping, signalled=4)
    task.loop.schedule = LoopSchedule(1, 10, validate_every=4, validate_first=False)
    task.loop._keep_weights = lambda validation: None
    await task.loop.fit(stopping)
    assert (around.saves, task.validated, task.loop.version) == ([5], [], 5)
    assert around.notes[0] == "asked to stop: skipped the validation after step 4"


async def test_the_time_of_a_validation_counts_toward_the_time_limit() -> None:
    around, clock = Recorder(), Clock()
    stopping = StopController(clock.now + 100, "the end", margin_s=10, clock=clock)
    task = Stepping(around, clock, 20, stopping)
    task.loop.schedule = LoopSchedule(1, 10, validate_every=2, validate_first=False)
    task.during_validation = lambda: setattr(clock, "now", clock.now + 35)
    await task.loop.fit(stopping)  # after 2 steps and a validation 25 s are left, and 30 are needed
    assert (around.saves, task.validated, stopping.exit_code) == ([2], [2], OUT_OF_TIME)


async def test_the_last_step_is_saved_without_its_validation_if_the_run_is_asked_to_end() -> None:
    around, stopping, clock = Recorder(), StopController(), Clock()
    task = Stepping(around, clock, 1, stopping, signalled=9)
    task.loop.schedule = LoopSchedule(1, 10, save_every=10, validate_every=10)
    await task.loop.fit(stopping)
    assert (around.saves, task.validated, stopping.exit_code) == ([10], [0], 0)
    assert around.notes == ["asked to stop: skipped the validation after step 10"]


async def test_a_run_stopped_before_its_first_step_does_no_step_and_saves_nothing() -> None:
    around, stopping, clock = Recorder(), StopController(), Clock()
    task = Stepping(around, clock, 1, stopping)
    task.during_validation = stopping.request_stop
    await task.loop.fit(stopping)
    assert (around.saves, task.loop.version, stopping.exit_code) == ([], 0, TERMINATED)
    assert around.notes[-1] == "asked to stop (SIGTERM): stopped before the first step; rerun the command to resume"


async def test_an_error_of_a_validation_ends_the_run() -> None:
    around, stopping, clock = Recorder(), StopController(), Clock()
    task = Stepping(around, clock, 1, stopping)

    def fails() -> None:
        raise ValueError("a reward function, perhaps")

    task.during_validation = fails
    with pytest.raises(ValueError, match="perhaps"):
        await task.loop.fit(stopping)


async def test_a_run_in_another_thread_leaves_signals_alone() -> None:
    async def run() -> str:
        with StopController().on_sigterm(print):
            return "ran"

    before = signal.getsignal(signal.SIGTERM)
    assert await asyncio.to_thread(asyncio.run, run()) == "ran"
    assert signal.getsignal(signal.SIGTERM) is before
