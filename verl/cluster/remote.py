"""One actor on a device, called from other processes under its name and with deadlines."""

from __future__ import annotations

from typing import Any

import ray

from verl.cluster.group import call
from verl.cluster.pool import DevicePool

__all__ = ["Remote", "spawn"]

START_DEADLINE_S, CLOSE_DEADLINE_S, PATIENCE_S = 900.0, 30.0, 600.0


def spawn(actor: type, *args: Any, pool: DevicePool, device: int, share: float) -> Any:
    """Ask Ray for the process; it comes up while the caller goes on. Its coroutines interleave without a bound."""
    return ray.remote(actor).options(max_concurrency=100_000, **pool.options(device, share=share)).remote(*args)


class Remote:
    """An actor with `start` and `close`; subclasses give its methods a face. Can be sent to other processes."""

    kind: str

    def __init__(self, actor: Any, number: int) -> None:
        self.actor, self.number = actor, number
        self._started = False

    async def start(self) -> None:
        await self._call("start", deadline_s=START_DEADLINE_S)
        self._started = True

    async def close(self) -> None:
        """End the process; what has started first ends its own children."""
        try:
            if self._started:
                await self._call("close", deadline_s=CLOSE_DEADLINE_S)
        finally:
            ray.kill(self.actor)

    async def _call(self, method: str, *args: Any, deadline_s: float | None = PATIENCE_S) -> Any:
        """Without a deadline somebody else must watch over it."""
        reference = getattr(self.actor, method).remote(*args)
        return await call(reference, what=f"{self.kind} {self.number}: {method}", deadline_s=deadline_s)
