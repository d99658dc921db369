"""The actor through which workers register their processes and send stalled calls to the controller, which inspects
processes on all nodes. Exists while `watch_for_hangs` is active; without it, nothing is registered or reported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.cluster.device_pool import run_on_node
from verl.cluster.hangs.detector import REPEAT_S, StalledCall, Watchdog, format_pending
from verl.cluster.hangs.pending_calls import (
    DEFAULT_TIMEOUTS,
    PENDING_CALLS,
    CallTarget,
    Progress,
    Timeout,
    track_call,
)
from verl.cluster.hangs.process_info import ProcessInfo, enable_stack_dumps, inspect_processes
from verl.cluster.hangs.report import Locations, ProcessLocation, Reporter
from verl.cluster.local import LocalActor

CONTROLLER = "controller"
_INSPECT_S, _LOCATE_S, _REPLY_S = 15.0, 10.0, 20.0

_registry: Any = None  # a handle of `Registry`
_caller = CONTROLLER
_reported: dict[tuple[str, CallTarget], float] = {}


class Registry:
    """Knows where the processes of a run are, and passes stalled calls from workers to the controller."""

    def __init__(self) -> None:
        self._locations: dict[CallTarget, ProcessLocation] = {}
        self._stalled: asyncio.Queue[tuple[int, StalledCall]] = asyncio.Queue()
        self._replies: dict[int, asyncio.Future[str]] = {}
        self._count = 0

    async def register(self, target: CallTarget, location: ProcessLocation) -> None:
        self._locations[target] = location

    async def locate(self, targets: Sequence[CallTarget]) -> dict[CallTarget, ProcessLocation]:
        return {target: self._locations[target] for target in targets if target in self._locations}

    async def list_pids(self) -> dict[CallTarget, int]:
        return {target: location.pid for target, location in self._locations.items()}

    async def submit(self, stalled: StalledCall) -> str:
        """Return the path of the report, once the controller has written it."""
        self._count += 1
        reply = self._replies[self._count] = asyncio.get_running_loop().create_future()
        self._stalled.put_nowait((self._count, stalled))
        return await reply

    async def next_stalled(self) -> tuple[int, StalledCall]:
        return await self._stalled.get()

    async def reply(self, call_id: int, path: str) -> None:
        self._replies.pop(call_id).set_result(path)


def register_actor(actor: Any, target: CallTarget) -> None:
    """Have an actor register its process before it does anything else, and watch its own calls from then on."""
    if _registry is not None and not isinstance(actor, LocalActor):
        actor.__ray_call__.remote(_register, target, _registry)


def _register(_actor: Any, target: CallTarget, registry: Any) -> None:
    global _registry, _caller
    _registry, _caller = registry, str(target)
    _register_process(target)
    if not PENDING_CALLS.is_watched:
        Watchdog(PENDING_CALLS, _caller, _send).start()


def _register_process(target: CallTarget) -> None:
    enable_stack_dumps()
    node = ray.get_runtime_context().get_node_id()
    _registry.register.remote(target, ProcessLocation(os.getpid(), node, ray.util.get_node_ip_address()))


def report_failed_call(action: str, target: CallTarget, timeout: Timeout, cause: str) -> None:
    """Report a call that has timed out and was handled by its caller; the same kind only now and then."""
    if time.monotonic() - _reported.get((action, target), float("-inf")) > REPEAT_S:
        _reported[action, target] = time.monotonic()
        since = time.time() - timeout.seconds
        _send(StalledCall(_caller, action, (target,), timeout.seconds, since, timeout, is_overdue=True, cause=cause))


def report_restart(action: str, target: CallTarget, timeout: Timeout) -> None:
    """Report at once, not after half of the timeout, that a lost process is being waited for."""
    _send(StalledCall(_caller, action, (target,), 0.0, time.time(), timeout, is_overdue=False))


def _send(stalled: StalledCall) -> str:
    """Send a stalled call to the controller; return the path of the report on an overdue one."""
    if _registry is None:
        return ""
    reply = _registry.submit.remote(stalled)
    with contextlib.suppress(RayError):  # it took too long, or the registry is lost
        return str(ray.get(reply, timeout=_REPLY_S)) if stalled.is_overdue else ""
    return ""


@contextlib.contextmanager
def watch_for_hangs(
    folder: Path,
    note: Callable[[str], None],
    warn: Callable[[str], None],
    loop_timeout: Timeout = DEFAULT_TIMEOUTS.reply,
) -> Iterator[None]:
    """Report stalled calls of this process, the controller, and of all actors that register while the block runs.

    `note` prints slow calls, `warn` overdue ones, whose reports go into `folder`. The running event loop is watched as
    well: it may be blocked for `loop_timeout`.
    """
    global _registry
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    _registry = ray.remote(Registry).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()
    target, loop, progress = CallTarget(CONTROLLER), asyncio.get_running_loop(), Progress()
    _register_process(target)
    list_pending = partial(format_pending, CONTROLLER, PENDING_CALLS)
    reporter = Reporter(folder, note, warn, locate_processes, inspect_located, list_pending)
    request = _registry.next_stalled.remote()  # one is always pending, instead of one per tick

    def on_tick() -> None:
        nonlocal request
        loop.call_soon_threadsafe(lambda: setattr(progress, "finished_at", PENDING_CALLS.clock()))
        while ray.is_initialized() and ray.wait([request], timeout=0)[0]:
            ready, request = request, _registry.next_stalled.remote()
            try:
                call_id, stalled = ray.get(ready)
            except (RayActorError, OutOfMemoryError):  # its process has died, and is started again
                return
            _registry.reply.remote(call_id, reporter.report(stalled))

    watchdog = Watchdog(PENDING_CALLS, CONTROLLER, reporter.report, on_tick)
    watchdog.start()
    try:
        with track_call("turn its event loop", target=target, timeout=loop_timeout, progress=progress):
            yield
    finally:
        watchdog.close()
        if ray.is_initialized():
            ray.kill(_registry)
        _registry = None


def locate_processes(targets: Sequence[CallTarget]) -> Locations:
    with contextlib.suppress(RayError):
        return ray.get(_registry.locate.remote(list(targets)), timeout=_LOCATE_S)
    return {}


def list_processes() -> dict[CallTarget, int]:
    """Return the pid of every process that has registered; none if the registry does not reply."""
    if _registry is not None and ray.is_initialized():
        with contextlib.suppress(RayError):
            return ray.get(_registry.list_pids.remote(), timeout=_LOCATE_S)
    return {}


def inspect_located(locations: Locations) -> dict[CallTarget, list[ProcessInfo]]:
    """Inspect processes of this node directly, and others by a task on their node. Nodes that do not respond are
    skipped."""
    by_node: dict[str, dict[CallTarget, int]] = defaultdict(dict)
    for target, location in locations.items():
        by_node[location.node][target] = location.pid
    here = by_node.pop(ray.get_runtime_context().get_node_id(), {})
    tasks = {node: run_on_node(node, inspect_processes, list(pids.values())) for node, pids in by_node.items()}
    infos = dict(zip(here, inspect_processes(list(here.values())), strict=True))
    if tasks:
        ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=_INSPECT_S)
    for node, task in tasks.items():
        with contextlib.suppress(RayError):
            infos |= dict(zip(by_node[node], ray.get(task, timeout=0), strict=True))
    return infos
