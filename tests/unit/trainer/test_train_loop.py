"""What the loop saves before a run ends with an error."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from recording_console import RecordingConsole

from verl.errors import RewardError, StorageError
from verl.trainer.restarts import RestartTracker
from verl.trainer.train_loop import LoopSchedule, TrainLoop

pytestmark = pytest.mark.unit


class Failing:
    """A task whose third step fails, before or during its update."""

    def __init__(self, error: Exception, *, in_update: bool = False) -> None:
        self._error, self._in_update = error, in_update
        self.position = 0

    async def step(self, version: int) -> Any:
        self.position += 10
        if version == 2:
            raise self._error
        return {}

    async def begin(self, version: int) -> None: ...
    async def prepare_save(self, version: int) -> None: ...
    async def validate(self, version: int) -> None: ...

    async def diagnose(self, metrics: Any, version: int) -> list[Any]:
        return []

    def state(self, version: int) -> dict[str, Any]:
        return {"position": self.position}

    def has_weights(self, version: int) -> bool:
        return not self._in_update


class Saves:
    """A checkpointer that records."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, Any]] = []
        self.last: int | None = None
        self.longest_s = 0.0

    async def save(self, version: int, trainer: Any, *, is_last: bool = False) -> float:
        self.saved.append((version, trainer))
        self.last = version
        return 0.0

    async def poll(self) -> None: ...
    async def finish(self) -> None: ...


async def run(task: Failing, save_every: int | None) -> list[tuple[int, Any]]:
    saves, console = Saves(), RecordingConsole()
    tracker = SimpleNamespace(log=lambda *_: None)
    loop: TrainLoop[Failing] = TrainLoop(
        task,
        LoopSchedule(1, 10, save_every),
        saves,
        tracker,
        console,
        RestartTracker(console),  # type: ignore[arg-type]
    )
    with pytest.raises(type(task._error)):
        await loop.fit()
    return saves.saved


class Validating(Failing):
    """A task with validations, whose sixth step fails."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(StorageError("full"))
        self.events: list[str] = []
        self._error_of_validation = error
        self.validation: asyncio.Future[None] | None = None

    async def validate(self, version: int) -> None:
        self.events.append(f"validates {version}")
        for _ in range(10):
            await asyncio.sleep(0)
        if self._error_of_validation:
            raise self._error_of_validation
        self.events.append(f"validated {version}")

    async def step(self, version: int) -> Any:
        self.events.append(f"trains {version}")
        for _ in range(5):
            await asyncio.sleep(0)
        if version == 5:
            await super().step(2)
        if self.validation:
            await asyncio.wait([self.validation])
        self.events.append(f"syncs {version + 1}")
        return {}


def make_validating(task: Validating, *, total: int, every: int) -> TrainLoop[Validating]:
    seen: Any = SimpleNamespace(log=lambda *_: None)
    schedule, saves, console = (
        LoopSchedule(1, total, validate_every=every, validate_first=False),
        Saves(),
        RecordingConsole(),
    )
    keep = partial(setattr, task, "validation")
    return TrainLoop(task, schedule, saves, seen, console, RestartTracker(console), keep_weights=keep)  # type: ignore[arg-type]


async def test_a_validation_goes_on_beside_the_next_step_until_that_replaces_the_weights() -> None:
    await make_validating(task := Validating(), total=4, every=2).fit()
    beside = ["trains 2", "validates 2", "validated 2", "syncs 3"]
    last = ["trains 3", "syncs 4", "validates 4", "validated 4"]
    assert task.events == ["trains 0", "syncs 1", "trains 1", "syncs 2", *beside, *last]


@pytest.mark.parametrize("version", [0, 4])
async def test_a_run_that_only_validates_validates_once_the_version_it_begins_with(version: int) -> None:
    loop = make_validating(task := Validating(), total=4, every=2)
    loop.schedule, loop.version = replace(loop.schedule, validate_first=True, trains=False), version
    await loop.fit()
    assert task.events == [f"validates {version}", f"validated {version}"]


async def test_the_error_of_a_validation_beside_a_step_ends_the_run_after_the_step() -> None:
    loop = make_validating(Validating(RewardError("no score")), total=3, every=1)
    with pytest.raises(RewardError, match="no score"):
        await loop.fit()
    assert loop.version == 2


async def test_a_step_that_fails_ends_the_validation_beside_it() -> None:
    loop = make_validating(task := Validating(), total=10, every=5)
    with pytest.raises(StorageError):
        await loop.fit()
    assert task.events[-2:] == ["trains 5", "validates 5"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_run_saves_before_it_ends_because_the_object_store_is_full() -> None:
    task = Failing(StorageError("full"))
    assert await run(task, None) == [(2, {"position": 20})], "the state before the step that failed"


async def test_weights_that_were_being_changed_are_not_saved() -> None:
    assert await run(Failing(StorageError("full"), in_update=True), None) == []


async def test_a_saved_version_is_not_saved_again_before_exit() -> None:
    assert await run(Failing(StorageError("full")), 2) == [(2, {"position": 20})]
    assert await run(Failing(StorageError("full")), -1) == []
    assert await run(Failing(RewardError("wrong")), None) == []


@pytest.mark.parametrize(("is_beside", "version"), [(False, 2), (True, 3)])
async def test_what_a_validation_ends_is_saved_with_the_state_of_its_version(is_beside: bool, version: int) -> None:
    loop = make_validating(task := Validating(StorageError("full")), total=10, every=2)
    loop.schedule = replace(loop.schedule, save_every=None)
    if not is_beside:
        loop._keep_weights = None
    task.state = lambda version: {"position": 10 * version}  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        await loop.fit()
    assert loop.checkpointer.saved == [(version, {"position": 10 * version})]  # type: ignore[attr-defined]
