"""A client for one actor on a device."""

from __future__ import annotations

import asyncio
from typing import Any

from verl.cluster.group import await_reply
from verl.cluster.handles import kill_actor
from verl.cluster.hangs import DEFAULT_DEADLINES, CallTarget, Deadline, Deadlines, Progress, register_actor, track_call
from verl.errors import ProcessLostError

_POLL_S, _REPLY_S = 0.5, 10.0  # while a process is being replaced


class RemoteActor:
    """An actor with `start`, `has_started` and `close`. Can be pickled; subclasses add its methods."""

    kind: str

    def __init__(self, actor: Any, index: int, deadlines: Deadlines = DEFAULT_DEADLINES) -> None:
        self.actor, self.deadlines = actor, deadlines
        self.target = CallTarget(self.kind, index)
        self._started = False

    async def start(self) -> None:
        register_actor(self.actor, self.target)
        await self._call("start", deadline=self.deadlines.start)
        self._started = True

    async def end(self) -> None:
        """Kill the process, whatever its state; return once a new one, not yet started, has replaced it."""
        with track_call("be replaced", target=self.target, deadline=self.deadlines.start):
            if not await self._is_new():
                kill_actor(self.actor, restarts=True)
                while not await self._is_new():
                    await asyncio.sleep(_POLL_S)

    async def _is_new(self) -> bool:
        try:
            return not await asyncio.wait_for(self._call("has_started", deadline=None), _REPLY_S)
        except (ProcessLostError, asyncio.TimeoutError):
            return False

    async def close(self) -> None:
        """Kill the process for good, after it has ended its children if it has started."""
        try:
            if self._started:
                await self._call("close", deadline=self.deadlines.close)
        finally:
            kill_actor(self.actor)

    async def _call(self, method: str, *args: Any, deadline: Deadline | None, progress: Progress | None = None) -> Any:
        """Call a method; without a deadline the caller must watch over it."""
        reply = getattr(self.actor, method).remote(*args)
        return await await_reply(reply, action=method, target=self.target, deadline=deadline, progress=progress)
