"""What the loop saves before a run ends with an error."""

from __future__ import annotations

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
    async def validate(self, version: int) -> None: ...

    async def diagnose(self, metrics: Any, version: int) -> list[str]:
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


async def test_a_run_saves_before_it_ends_because_the_object_store_is_full() -> None:
    task = Failing(StorageError("full"))
    assert await run(task, None) == [(2, {"position": 20})], "the state before the step that failed"


async def test_weights_that_were_being_changed_are_not_saved() -> None:
    assert await run(Failing(StorageError("full"), in_update=True), None) == []


async def test_a_saved_version_is_not_saved_again_before_exit() -> None:
    assert await run(Failing(StorageError("full")), 2) == [(2, {"position": 20})]
    assert await run(Failing(StorageError("full")), -1) == []
    assert await run(Failing(RewardError("wrong")), None) == []
