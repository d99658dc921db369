"""One actor on a device, called from other processes under its name and with deadlines."""

from __future__ import annotations

import asyncio
from typing import Any

from verl.cluster.group import call
from verl.cluster.handles import end
from verl.cluster.hangs.pending_calls import DEFAULT_DEADLINES, CallTarget, Deadline, Deadlines, Progress, track_call
from verl.cluster.hangs.registry import register_actor
from verl.errors import ProcessLostError

__all__ = ["RemoteActor"]

NEW_YET_S, NEW_ANSWERS_S = 0.5, 10.0  # how often a process is asked whether it is a new one, and how long it may take


class RemoteActor:
    """An actor with `start`, `has_started` and `close`; subclasses give its methods a face. Can be sent elsewhere."""

    kind: str

    def __init__(self, actor: Any, number: int, deadlines: Deadlines = DEFAULT_DEADLINES) -> None:
        self.actor, self.number, self.deadlines = actor, number, deadlines
        self._started = False

    @property
    def target(self) -> CallTarget:
        """How it is named where it is waited for."""
        return CallTarget(self.kind, self.number)

    async def start(self) -> None:
        register_actor(self.actor, self.target)
        await self._call("start", deadline=self.deadlines.start)
        self._started = True

    async def end(self) -> None:
        """End the process, whatever state it is in; returns once a new one, not yet started, is in its place."""
        with track_call("end, and be replaced", target=self.target, deadline=self.deadlines.start):
            if not await self._is_new():
                end(self.actor, restarts=True)
                while not await self._is_new():
                    await asyncio.sleep(NEW_YET_S)

    async def _is_new(self) -> bool:
        """No wait of its own: one that hangs does not answer, and is asked again."""
        try:
            return not await asyncio.wait_for(self._call("has_started", deadline=None), NEW_ANSWERS_S)
        except (ProcessLostError, asyncio.TimeoutError):
            return False

    async def close(self) -> None:
        """End the process for good; what has started first ends its own children."""
        try:
            if self._started:
                await self._call("close", deadline=self.deadlines.close)
        finally:
            end(self.actor)

    async def _call(self, method: str, *args: Any, deadline: Deadline | None, progress: Progress | None = None) -> Any:
        """Without a deadline somebody else must watch over it."""
        reference = getattr(self.actor, method).remote(*args)
        return await call(reference, action=method, target=self.target, deadline=deadline, progress=progress)
