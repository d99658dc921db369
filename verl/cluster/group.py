"""Actors that act together: one call, one answer per rank, one deadline for all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

from verl.cluster.handles import end, get_all
from verl.cluster.hangs.pending_calls import CallTarget, Deadline, Progress, format_report_hint, track_call
from verl.cluster.hangs.registry import register_actor
from verl.errors import ProcessLostError, VerlError, WorkerTimeoutError

__all__ = ["ActorGroup", "call", "fetch"]

DEATH_IS_KNOWN_S = 30.0  # from a death to its being known, at most


async def call(
    awaitable: Any,
    *,
    action: str,
    target: CallTarget,
    deadline: Deadline | None = None,
    progress: Progress | None = None,
    peers: int = 0,
) -> Any:
    """Await a Ray reference: `target` is to do `action`, before a deadline unless somebody else watches over it.

    With `progress` the deadline runs from the last thing that `target` has finished; this one is noted there as well.
    Our own exceptions come through as they were raised, with no wrapper around the message.
    """
    if deadline is None:
        return await _answer(awaitable, action, target)
    answer = asyncio.ensure_future(_answer(awaitable, action, target))
    try:
        with track_call(action, target=target, deadline=deadline, progress=progress, peers=peers) as wait:
            while not (await asyncio.wait([answer], timeout=wait.remaining_s))[0]:
                if wait.remaining_s <= 0:
                    raise WorkerTimeoutError(
                        f"Timed out after {wait.elapsed_s:.0f} s waiting for {target} ({action}). "
                        f"Increase {deadline.setting or 'the deadline'} if this is expected."
                        f"{await format_report_hint(wait)}"
                    )
            if progress is not None:
                progress.at = wait.clock()
            return answer.result()
    finally:
        answer.cancel()  # of no effect on one that is done


async def _answer(awaitable: Any, action: str, target: CallTarget) -> Any:
    try:
        return await awaitable
    except RayTaskError as error:
        if isinstance(error.cause, VerlError):
            raise error.cause from None
        if isinstance(error.cause, (ObjectLostError, RayActorError)):  # what it was to read went with its owner
            raise ProcessLostError(
                f"{target}: {action}: another process that it needs has died: {_death(error.cause)}"
            ) from error
        raise
    except RayActorError as error:
        raise ProcessLostError(f"{target}: {action}: its process has died: {_death(error)}") from error


def _death(error: BaseException) -> str:
    """Ray's account of it in one line, without identifiers and guesses."""
    hint = str(error).partition("Some common causes")[0]
    lines = [line.strip() for line in hint.splitlines()]
    said_elsewhere = ("class_name:", "actor_id:", "namespace:", "The actor died unexpectedly")
    return ", ".join(line for line in lines if line and not line.startswith(said_elsewhere))


def fetch(references: Sequence[Any], *, action: str, target: CallTarget, deadline: Deadline) -> list[Any]:
    """`ray.get` for workers without an event loop: a wait like any other."""
    with track_call(action, target=target, deadline=deadline) as wait:
        try:
            return get_all(references, deadline.seconds)
        except GetTimeoutError as error:
            hint = asyncio.run(format_report_hint(wait))
            raise WorkerTimeoutError(
                f"waited {wait.elapsed_s:.0f} s for {target} to {action} and gave up ({deadline}){hint}"
            ) from error


class ActorGroup:
    """The actors of one distributed job, by rank. Collective by nature: every call goes to all of them."""

    def __init__(self, name: str, actors: Sequence[Any]) -> None:
        self.name, self.actors = name, list(actors)
        for rank, actor in enumerate(self.actors):
            register_actor(actor, CallTarget(name, rank))

    def __len__(self) -> int:
        return len(self.actors)

    async def call(
        self, method: str, *args: Any, deadline: Deadline, per_rank: Sequence[Any] | None = None
    ) -> list[Any]:
        """Call `method` on every rank with the same `args`, or with its own item of `per_rank` before them.

        The first failure ends the wait: the other ranks may be stuck in a collective that will never complete.
        """
        own = [()] * len(self.actors) if per_rank is None else [(item,) for item in per_rank]
        tasks = [
            asyncio.ensure_future(
                call(
                    getattr(actor, method).remote(*first, *args),
                    action=method,
                    target=CallTarget(self.name, rank),
                    deadline=deadline,
                    peers=len(self.actors),
                )
            )
            for rank, (actor, first) in enumerate(zip(self.actors, own, strict=True))
        ]
        try:
            return list(await asyncio.gather(*tasks))
        except VerlError:
            raise
        except Exception as error:  # such as a collective that was broken off: by whom?
            await self._raise_loss(tasks, error)
            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _raise_loss(self, tasks: Sequence[asyncio.Future[Any]], error: Exception) -> None:
        """When one of the ranks dies, the others fail in their collective, and their complaint may come first."""
        await asyncio.wait(tasks, timeout=DEATH_IS_KNOWN_S)
        for task in tasks:
            if task.done() and isinstance(task.exception(), ProcessLostError):
                raise ProcessLostError(str(task.exception())) from error

    def close(self) -> None:
        """End the actors' processes."""
        for actor in self.actors:
            end(actor)
