"""One actor on a device, called from other processes under its name and with deadlines."""

from __future__ import annotations

from typing import Any

import ray

from verl.cluster.census import introduce
from verl.cluster.group import call
from verl.cluster.pool import DevicePool
from verl.cluster.waits import DEFAULTS, Deadline, Deadlines, Owner, Progress

__all__ = ["Remote", "spawn"]


def spawn(actor: type, *args: Any, pool: DevicePool, device: int, share: float) -> Any:
    """Ask Ray for the process; it comes up while the caller goes on. Its coroutines interleave without a bound."""
    return ray.remote(actor).options(max_concurrency=100_000, **pool.options(device, share=share)).remote(*args)


class Remote:
    """An actor with `start` and `close`; subclasses give its methods a face. Can be sent to other processes."""

    kind: str

    def __init__(self, actor: Any, number: int, deadlines: Deadlines = DEFAULTS) -> None:
        self.actor, self.number, self.deadlines = actor, number, deadlines
        self._started = False

    @property
    def owner(self) -> Owner:
        """How it is named where it is waited for."""
        return Owner(self.kind, self.number)

    async def start(self) -> None:
        introduce(self.actor, self.owner)
        await self._call("start", deadline=self.deadlines.start)
        self._started = True

    async def close(self) -> None:
        """End the process; what has started first ends its own children."""
        try:
            if self._started:
                await self._call("close", deadline=self.deadlines.close)
        finally:
            ray.kill(self.actor)

    async def _call(self, method: str, *args: Any, deadline: Deadline | None, progress: Progress | None = None) -> Any:
        """Without a deadline somebody else must watch over it."""
        reference = getattr(self.actor, method).remote(*args)
        return await call(reference, what=method, of=self.owner, deadline=deadline, progress=progress)
