"""Actors that act together: one call, one answer per rank, one deadline for all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from verl.errors import ProcessLostError, VerlError

__all__ = ["ActorGroup", "call"]


async def call(awaitable: Any, *, what: str, deadline_s: float | None = None) -> Any:
    """Await a Ray reference under a name, with a deadline unless somebody else watches over it.

    Our own exceptions come through as they were raised, with no wrapper around the message.
    """
    try:
        return await asyncio.wait_for(_awaited(awaitable), deadline_s)
    except asyncio.TimeoutError as error:
        raise ProcessLostError(f"waited {deadline_s:.0f} s for {what} and gave up") from error
    except RayTaskError as error:
        if isinstance(error.cause, VerlError):
            raise error.cause from None
        if isinstance(error.cause, (ObjectLostError, RayActorError)):  # what it was to read went with its owner
            raise ProcessLostError(f"{what}: another process that it needs has died: {error.cause}") from error
        raise
    except RayActorError as error:
        raise ProcessLostError(f"the process behind {what} has died: {error}") from error


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


class ActorGroup:
    """The actors of one distributed job, by rank. Collective by nature: every call goes to all of them."""

    def __init__(self, name: str, actors: Sequence[Any], *, deadline_s: float = 1800.0) -> None:
        self.name, self.actors, self._deadline_s = name, list(actors), deadline_s

    def __len__(self) -> int:
        return len(self.actors)

    async def call(self, method: str, *args: Any, per_rank: Sequence[Any] | None = None) -> list[Any]:
        """Call `method` on every rank with the same `args`, or with its own item of `per_rank` before them.

        The first failure ends the wait: the other ranks may be stuck in a collective that will never complete.
        """
        own = [()] * len(self.actors) if per_rank is None else [(item,) for item in per_rank]
        tasks = [
            asyncio.ensure_future(
                call(
                    getattr(actor, method).remote(*first, *args),
                    what=f"{self.name} rank {rank}: {method}",
                    deadline_s=self._deadline_s,
                )
            )
            for rank, (actor, first) in enumerate(zip(self.actors, own, strict=True))
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """End the actors' processes."""
        for actor in self.actors:
            ray.kill(actor)
