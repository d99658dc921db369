"""Engines join and leave until there are as many as `verl scale` asks for."""

import asyncio
import json
from pathlib import Path

import pytest

from verl.rollout.scaling import REQUEST, EngineScaler, read_status, write_json
from verl.rollout.supervisor import EngineState

pytestmark = pytest.mark.unit

READY, LOST, JOINING = EngineState.READY, EngineState.RESTARTING, EngineState.JOINING


class Supervisor:
    """Knows states only; an engine that leaves is gone at once."""

    def __init__(self, *states: EngineState) -> None:
        self.states = dict(enumerate(states))
        self.next_id = len(states)

    def add(self, spawn) -> int:
        spawn(self.next_id)
        self.states[self.next_id] = JOINING
        self.next_id += 1
        return self.next_id - 1

    async def remove(self, engine_id: int, *, drain_timeout_s: float) -> None:
        del self.states[engine_id]


class Placer:
    def __init__(self, devices: int) -> None:
        self.devices, self.limit, self.waits = devices, "", False
        self.used: set[int] = set()

    def describe_limit(self, count: int) -> str:
        return self.limit

    def find(self) -> bool:
        self.waits = len(self.used) == self.devices
        return not self.waits

    def stop_finding(self) -> None:
        self.waits = False

    def spawn(self, engine_id: int) -> None:
        self.used.add(engine_id)

    def release(self, engine_id: int) -> None:
        self.used.discard(engine_id)


class Scene:
    def __init__(self, folder: Path, *states: EngineState, devices: int = 8) -> None:
        self.folder, self.notes = folder, list[str]()
        self.supervisor, self.placer = Supervisor(*states), Placer(devices)
        self.scaler = EngineScaler(self.supervisor, self.placer, folder, self.notes.append)  # type: ignore[arg-type]

    async def ask(self, engines: int) -> None:
        write_json(self.folder / REQUEST, {"engines": engines})
        await self.update()

    async def update(self) -> None:
        self.scaler.update()
        while self.scaler._leaving:
            await asyncio.sleep(0)
        self.scaler.update()


async def test_engines_join_and_the_request_is_removed_when_the_status_has_them(tmp_path: Path) -> None:
    scene = Scene(tmp_path, READY)
    await scene.ask(3)
    assert not (tmp_path / REQUEST).exists()
    assert read_status(tmp_path) == {
        "wanted": 3,
        "engines": {"0": "ready", "1": "joining", "2": "joining"},
        "refusal": "",
    }
    assert scene.notes == ["verl scale: 1 -> 3 rollout engines"]


async def test_engines_that_are_not_ready_leave_first_and_then_the_newest(tmp_path: Path) -> None:
    scene = Scene(tmp_path, READY, LOST, READY, READY)
    await scene.ask(2)
    assert scene.supervisor.states == {0: READY, 2: READY}
    assert scene.notes[1:] == ["rollout engine 1 has left", "rollout engine 3 has left"]


async def test_an_engine_joins_as_soon_as_the_cluster_has_devices(tmp_path: Path) -> None:
    scene = Scene(tmp_path, READY, devices=1)
    await scene.ask(3)
    assert (list(scene.supervisor.states), scene.placer.waits) == ([0, 1], True)
    scene.placer.devices = 4
    await scene.update()
    assert (list(scene.supervisor.states), scene.placer.waits) == ([0, 1, 2], False)


async def test_waiting_for_devices_ends_when_fewer_engines_are_wanted(tmp_path: Path) -> None:
    scene = Scene(tmp_path, READY, devices=0)
    await scene.ask(2)
    assert scene.placer.waits
    await scene.ask(1)
    assert not scene.placer.waits
    assert scene.supervisor.states == {0: READY}


async def test_an_engine_that_is_given_up_is_replaced_once_for_each_request(tmp_path: Path) -> None:
    scene = Scene(tmp_path, READY, EngineState.GIVEN_UP)
    await scene.update()
    assert list(scene.supervisor.states) == [0, 1]
    for joined in (2, 3):
        await scene.ask(2)
        assert scene.supervisor.states == {0: READY, joined: JOINING}
        scene.supervisor.states[joined] = EngineState.GIVEN_UP
        await scene.update()
        assert list(scene.supervisor.states) == [0, joined], "another one would not start either"
    assert scene.placer.used == {3}, "the others have released their devices"


async def test_an_engine_that_is_given_up_leaves_first(tmp_path: Path) -> None:
    scene = Scene(tmp_path, EngineState.GIVEN_UP, READY, READY)
    await scene.ask(1)
    assert scene.supervisor.states == {1: READY}


async def test_what_is_not_possible_is_refused_with_the_reason(tmp_path: Path) -> None:
    scene = Scene(tmp_path, READY)
    scene.placer.limit = "there is no room"
    await scene.ask(2)
    assert scene.supervisor.states == {0: READY}
    assert json.loads((tmp_path / "engines.json").read_text())["refusal"] == "there is no room"
    assert not (tmp_path / REQUEST).exists()


async def test_a_file_that_cannot_be_read_does_not_end_the_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path, READY)
    (tmp_path / REQUEST).write_text("{")
    scene.scaler.start()
    await asyncio.sleep(0.01)
    await scene.scaler.close()
    assert scene.notes == ["verl scale: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"]
    assert (read_status(tmp_path) or {})["engines"] == {}
