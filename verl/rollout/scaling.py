"""Scaling: the number of a run's rollout engines follows what `verl scale` asks for.

The command writes a request into the run's folder. The run reads the request, describes its engines in a status file,
and removes the request.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from verl.rollout.supervisor import EngineState, EngineSupervisor

REQUEST, STATUS = "scale.json", "engines.json"
POLL_S = 1.0
DRAIN_S = 600.0
"""How long an engine that leaves may finish its requests; then they run again on other engines."""
_GONE = (EngineState.DRAINING, EngineState.LEFT)


class EnginePlacer(Protocol):
    """Finds devices for engines that join."""

    def describe_limit(self, count: int) -> str:
        """Return why there cannot be `count` engines; empty if there can."""
        ...

    def find(self) -> bool:
        """Return whether there are devices for another engine; if not, wait for them in the background."""
        ...

    def stop_finding(self) -> None:
        """Wait no longer."""
        ...

    def spawn(self, engine_id: int) -> Any:
        """Return an engine, not yet started, on the devices that were found."""
        ...

    def release(self, engine_id: int) -> None:
        """Take back the devices of an engine that has left."""
        ...


class EngineScaler:
    """Lets engines join and leave until there are as many as wanted; without a request it changes nothing.

    Engines that join wait for devices as long as necessary, so that nodes may join the cluster later. Of the engines
    that leave, those that are not ready come first, and then the newest. A request replaces engines that were given up.
    """

    def __init__(
        self,
        supervisor: EngineSupervisor,
        placer: EnginePlacer,
        folder: Path,
        note: Callable[[str], None],
        *,
        wanted: int | None = None,
        drain_s: float = DRAIN_S,
    ) -> None:
        self._supervisor, self._placer, self._folder, self._note = supervisor, placer, folder, note
        self.wanted, self._drain_s = wanted, drain_s
        self._task: asyncio.Future[None] | None = None
        self._leaving: dict[int, asyncio.Future[None]] = {}
        self._status: dict[str, Any] = {}

    def start(self) -> None:
        """Follow requests until `close`."""
        self._task = asyncio.ensure_future(self._follow_requests())

    async def close(self) -> None:
        """Stop following requests. Call it before closing the supervisor."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            with suppress(OSError):
                write_json(self._folder / STATUS, {"wanted": self.wanted, "engines": {}, "refusal": ""})

    async def _follow_requests(self) -> None:
        last = ""
        while True:
            try:
                self.update()
            except Exception as error:  # noqa: BLE001 - a file that cannot be written must not end the run
                if (text := str(error) or repr(error)) != last:
                    self._note(f"verl scale: {text}")
                last = text
            await asyncio.sleep(POLL_S)

    def update(self) -> None:
        """Read a request, start what it asks for, and write the status."""
        request = _read(self._folder / REQUEST)
        refusal = ""
        if request is not None and not (refusal := self._placer.describe_limit(request["engines"])):
            self.wanted = request["engines"]
            for engine_id, state in self._supervisor.states.items():
                if state is EngineState.GIVEN_UP:  # without a request, its successors would follow each other forever
                    self._start_removing(engine_id)
            self._note(f"verl scale: {len(self._list_staying())} -> {self.wanted} rollout engines")
        if self.wanted is not None:
            self._scale(self.wanted)
        states = {str(engine_id): state.value for engine_id, state in self._supervisor.states.items()}
        self._write_status({"wanted": self.wanted, "engines": states}, refusal, is_reply=request is not None)

    def _list_staying(self) -> list[int]:
        states = self._supervisor.states
        return [each for each, state in states.items() if state not in _GONE and each not in self._leaving]

    def _scale(self, wanted: int) -> None:
        states, staying = self._supervisor.states, self._list_staying()
        order = sorted(staying, key=lambda engine_id: (states[engine_id] is EngineState.READY, -engine_id))
        for engine_id in order[: max(0, len(staying) - wanted)]:
            self._start_removing(engine_id)
        missing = wanted - len(staying)
        while missing > 0 and self._placer.find():
            self._supervisor.add(self._placer.spawn)
            missing -= 1
        if missing <= 0:
            self._placer.stop_finding()

    def _start_removing(self, engine_id: int) -> None:
        leaving = asyncio.ensure_future(self._remove(engine_id))
        self._leaving[engine_id] = leaving
        leaving.add_done_callback(lambda _: self._leaving.pop(engine_id))

    async def _remove(self, engine_id: int) -> None:
        await self._supervisor.remove(engine_id, drain_timeout_s=self._drain_s)
        self._placer.release(engine_id)
        self._note(f"rollout engine {engine_id} has left")

    def _write_status(self, status: dict[str, Any], refusal: str, *, is_reply: bool) -> None:
        """Write the status if it has changed, and then remove a request, which tells the command to read it."""
        if is_reply or status != self._status:
            write_json(self._folder / STATUS, status | {"refusal": refusal})
            self._status = status
        if is_reply:
            (self._folder / REQUEST).unlink(missing_ok=True)


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return the number of engines that are wanted, and the state of each; None if no run has written it."""
    return _read(folder / STATUS)


def write_json(path: Path, value: Any) -> None:
    """Write a file that its readers see whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value), encoding="utf-8")
    draft.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    with suppress(FileNotFoundError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return None
