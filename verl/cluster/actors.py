"""Actors and object references, with Ray or within one process (`local.py`): calls with timeouts, a client for one
actor, and groups of actors that are called together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from verl.cluster.device_pool import PlacementPool
from verl.cluster.hangs.pending_calls import (
    DEFAULT_TIMEOUTS,
    CallTarget,
    PendingCall,
    Progress,
    Timeout,
    Timeouts,
    format_report_hint,
    track_call,
)
from verl.cluster.hangs.registry import register_actor
from verl.cluster.local import LocalActor
from verl.cluster.memory_deaths import explain_death
from verl.cluster.object_store import FULL_ERRORS, describe_full_store, get_all
from verl.cluster.ray_private import get_session_folder
from verl.cluster.worker_logs import get_worker_log
from verl.errors import EngineError, ProcessLostError, StorageError, VerlError, WorkerTimeoutError
from verl.process_output import format_tail
from verl.waiting import with_timeout

DEATH_DETECTION_S = 30.0  # upper bound
_POLL_S, _REPLY_S = 0.5, 10.0  # while a process is being replaced
_DEATHS = (RayActorError, OutOfMemoryError)
OUTPUT_LINES = 8  # how much of the output of a dead process its error shows
_PORTS = range(20_000, 32_000)  # below the ephemeral ports, which the system could hand out before a server listens

A = TypeVar("A", bound="RemoteActor")


def kill_actor(actor: Any, *, restarts: bool = False) -> None:
    """Kill an actor's process; with `restarts` Ray starts a new one under the same handle."""
    if isinstance(actor, LocalActor):
        actor._exit()
    elif ray.is_initialized():  # else it has ended with the cluster, and Ray would start another one
        ray.kill(actor, no_restart=not restarts)


def use_accelerators(names: str) -> None:
    """Use accelerators that Ray has assigned to other processes; before torch looks for them. Empty: no change."""
    if names:
        os.environ["CUDA_VISIBLE_DEVICES"] = names


def get_node_address() -> str:
    """Return the address at which other processes of the run reach this one."""
    return ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"


def free_port() -> int:
    """Return a port of this machine that is free now."""
    generator = random.SystemRandom()  # unseeded: ranks and runs that share a seed must not share ports
    while True:
        port = generator.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


async def await_reply(
    reply: Any,
    *,
    action: str,
    target: CallTarget,
    timeout: Timeout | None = None,
    progress: Progress | None = None,
    peers: int = 0,
) -> Any:
    """Await the reference that a call to an actor returned. Exceptions of verl are raised without Ray's wrapper.

    Without a `timeout` the caller must watch over the call. The timeouts of calls that share a `progress` restart
    whenever one of them returns. `peers` is the size of the group that got the same call.
    """
    unwrapped = _unwrap_errors(reply, action, target)
    if timeout is None:
        return await unwrapped
    with track_call(action, target=target, timeout=timeout, progress=progress, peers=peers) as call:
        try:
            result = await with_timeout(unwrapped, lambda: call.remaining_s)
        except TimeoutError:
            if call.remaining_s > 0:  # the worker's own error
                raise
            raise _timeout_error(call, await format_report_hint(call)) from None
        if progress is not None:
            progress.finished_at = call.clock()
        return result


def _timeout_error(call: PendingCall, hint: str) -> WorkerTimeoutError:
    setting = call.timeout.setting or "the timeout"
    return WorkerTimeoutError(
        f"Timed out after {call.elapsed_s:.0f} s waiting for {call.target} ({call.action}). "
        f"Increase {setting} if this is expected.{hint}"
    )


async def _unwrap_errors(reply: Any, action: str, target: CallTarget) -> Any:
    try:
        return await reply
    except RayTaskError as error:
        place = f"in {target} ({action}), pid {_find_pid(error)}{_describe_log(target)}"
        error.add_note(place)
        if isinstance(error.cause, VerlError):
            error.cause.add_note(place)
            raise error.cause from None
        if isinstance(error.cause, FULL_ERRORS):
            raise StorageError(f"{target}: {action}: {describe_full_store()}") from error
        if isinstance(error.cause, (ObjectLostError, *_DEATHS)):  # an object that it reads is lost with its owner
            raise ProcessLostError(
                f"{target}: {action}: another process that it needs has died: {await _summarize_death(error.cause)}"
            ) from error
        raise
    except FULL_ERRORS as error:
        raise StorageError(f"{target}: {action}: {describe_full_store()}") from error
    except RuntimeEnvSetupError as error:
        raise EngineError(f"{target}: its process cannot start: {error.error_message}") from error
    except _DEATHS as error:
        loss = ProcessLostError(f"{target}: {action}: its process has died: {await _summarize_death(error)}")
        output = _tail_output(error) if isinstance(error, RayActorError) else ""
        if note := output + _describe_log(target, "\nAll of "):
            loss.add_note(note.strip())
        raise loss from error


def _describe_log(target: CallTarget, before: str = ", ") -> str:
    """Return where the output of a worker is copied to."""
    path = get_worker_log(target)
    return "" if path is None else f"{before}its output: {path}"


def _find_pid(error: RayError) -> str:
    """Return the process that an error of Ray is about. Its text says so, and its attributes do not always."""
    match = re.search(r"\bpid[=:] ?(\d+)", str(error))
    return match[1] if match else "unknown"


def _tail_output(error: RayActorError) -> str:
    """Return the last lines that a dead actor has written, if its machine is this one."""
    files = Path(get_session_folder() or "").glob(f"logs/worker-*-{_find_pid(error)}.err")
    return next((format_tail(file, OUTPUT_LINES) for file in files if file.stat().st_size), "")


async def _summarize_death(error: RayError) -> str:
    """Return why a process has died in one line: what filled the memory, or Ray's message without identifiers."""
    if reason := await explain_death(error):
        return reason
    lines = [line.strip() for line in str(error).partition("Some common causes")[0].splitlines()]
    noise = ("class_name:", "actor_id:", "namespace:", "The actor died unexpectedly")
    return ", ".join(line for line in lines if line and not line.startswith(noise))


def get_objects(references: Sequence[Any], *, action: str, target: CallTarget, timeout: Timeout) -> list[Any]:
    """Return the referenced objects, for workers without an event loop. Blocks, as a tracked call."""
    with track_call(action, target=target, timeout=timeout) as call:
        try:
            return get_all(references, timeout.seconds)
        except GetTimeoutError as error:
            raise _timeout_error(call, asyncio.run(format_report_hint(call))) from error


class ActorGroup:
    """The actors of one distributed job, by rank. They are called together, one call at a time."""

    def __init__(self, name: str, actors: Sequence[Any]) -> None:
        self.name, self.actors, self._lock = name, list(actors), asyncio.Lock()
        for rank, actor in enumerate(self.actors):
            register_actor(actor, CallTarget(name, rank))

    async def call(self, method: str, *args: Any, timeout: Timeout, per_rank: Sequence[Any] | None = None) -> list[Any]:
        """Call `method` on every rank with the same `args`, preceded by its item of `per_rank`; return all replies.

        The first failure is raised at once: the other ranks may be stuck in a collective that never completes. The
        timeout starts when the ranks are free: a weight sync to an engine that has restarted may have to wait for a
        save of an hour.
        """
        first_args = [()] * len(self.actors) if per_rank is None else [(item,) for item in per_rank]
        async with self._lock:
            tasks = [
                self._call_rank(rank, method, *first, *args, timeout=timeout)
                for rank, first in zip(range(len(self.actors)), first_args, strict=True)
            ]
            async with self._waiting_for(tasks):
                return list(await asyncio.gather(*tasks))

    @asynccontextmanager
    async def call_others(
        self,
        method: str,
        *,
        timeout: Timeout,
        pause_s: float = 0.0,
        collect: Callable[[list[Any]], None] = lambda replies: None,
    ) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
        """Call `method` once on all ranks but 0; yield a function that calls rank 0, any number of times.

        At the end of the block rank 0 has to have done its part of all collectives of `method`. Timeouts start
        again with each reply of rank 0, between whose calls `pause_s` may pass. Until then no other call reaches the
        ranks. `collect` gets the replies of the others.
        """
        progress, longest = Progress(), timeout._replace(seconds=timeout.seconds + pause_s)
        async with self._lock:
            tasks = [
                self._call_rank(rank, method, timeout=longest, progress=progress) for rank in range(1, len(self.actors))
            ]
            others = asyncio.gather(*tasks)

            def call_first(method: str, *args: Any) -> Awaitable[Any]:
                # Called now, even if the caller is cancelled before it waits: the other ranks wait for this call.
                return wait_for(self._call_rank(0, method, *args, timeout=timeout, progress=progress))

            async def wait_for(reply: asyncio.Future[Any]) -> Any:
                async with self._waiting_for([reply, *tasks], ending=[reply]):
                    await asyncio.wait([reply, others], return_when=asyncio.FIRST_COMPLETED)
                    if others.done():
                        others.result()  # raises the failure of another rank
                    return await reply

            async with self._waiting_for(tasks):
                yield call_first
                collect(await others)

    def _call_rank(
        self, rank: int, method: str, *args: Any, timeout: Timeout, progress: Progress | None = None
    ) -> asyncio.Future[Any]:
        return asyncio.ensure_future(
            await_reply(
                getattr(self.actors[rank], method).remote(*args),
                action=method,
                target=CallTarget(self.name, rank),
                timeout=timeout,
                progress=progress,
                peers=len(self.actors),
            )
        )

    @asynccontextmanager
    async def _waiting_for(
        self, tasks: Sequence[asyncio.Future[Any]], *, ending: Sequence[asyncio.Future[Any]] | None = None
    ) -> AsyncIterator[None]:
        """Wrap the wait for calls: explain their failures, and forget them at the end, or those of `ending` only."""
        try:
            yield
        except VerlError:
            raise
        except Exception as error:  # such as a collective that broke because another rank died
            await self._raise_death(tasks, error)
            raise
        finally:
            for task in tasks if ending is None else ending:
                task.cancel()

    async def _raise_death(self, tasks: Sequence[asyncio.Future[Any]], error: Exception) -> None:
        """Raise the death of a rank instead of the errors that it causes in the others, which may arrive first."""
        await asyncio.wait(tasks, timeout=DEATH_DETECTION_S)
        for task in tasks:
            if task.done() and isinstance(task.exception(), ProcessLostError):
                raise ProcessLostError(str(task.exception())) from error

    def close(self) -> None:
        """Kill the actors' processes."""
        for actor in self.actors:
            kill_actor(actor)


class RemoteActor:
    """A client of an actor with `start`, `has_started` and `close`. Can be pickled.

    `methods` are the other methods of the actor that can be called, and the timeout of each.
    """

    kind: ClassVar[str]
    actor_class: ClassVar[type]
    methods: ClassVar[Mapping[str, str]] = {}

    def __init__(self, actor: Any, index: int, timeouts: Timeouts = DEFAULT_TIMEOUTS) -> None:
        self.actor, self.timeouts = actor, timeouts
        self.target = CallTarget(self.kind, index)
        self._started = False

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name not in self.methods:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return partial(self._call, name, timeout=getattr(self.timeouts, self.methods[name]))

    @classmethod
    def spawn(
        cls: type[A],
        pool: PlacementPool,
        index: int,
        *args: Any,
        device: int,
        share: float = 0.0,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ) -> A:
        """Spawn the actor with `args` at a device, without waiting for its process."""
        actor = pool.spawn(cls.actor_class, *args, device=device, share=share, is_async=True, restarts=True)
        return cls(actor, index, timeouts)

    async def start(self) -> None:
        register_actor(self.actor, self.target)
        await self._call("start", timeout=self.timeouts.start)
        self._started = True

    async def end(self) -> None:
        """Kill the process, whatever its state; return once a new one, not yet started, has replaced it."""
        with track_call("be replaced", target=self.target, timeout=self.timeouts.start):
            if not await self._is_new():
                kill_actor(self.actor, restarts=True)
                while not await self._is_new():
                    await asyncio.sleep(_POLL_S)

    async def _is_new(self) -> bool:
        try:
            return not await asyncio.wait_for(self._call("has_started", timeout=None), _REPLY_S)
        except (TimeoutError, ProcessLostError):
            return False

    async def close(self) -> None:
        """Kill the process for good, after it has ended its children if it has started."""
        try:
            if self._started:
                await self._call("close", timeout=self.timeouts.close)
        finally:
            kill_actor(self.actor)

    async def _call(self, method: str, *args: Any, timeout: Timeout | None, progress: Progress | None = None) -> Any:
        reply = getattr(self.actor, method).remote(*args)
        return await await_reply(reply, action=method, target=self.target, timeout=timeout, progress=progress)
