"""Who is where in the cluster: processes make themselves known, tell of late waits, and are looked at from afar.

What is told lies in the key-value store of Ray's own control service: a process that is stuck can still be told of, and
nobody has to be up for it but Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.cluster.hangs.detector import SAID_AGAIN_S, ProcessLocation, Reporter, StalledCall, Watchdog, format_pending
from verl.cluster.hangs.pending_calls import (
    DEFAULT_DEADLINES,
    PENDING_CALLS,
    CallTarget,
    Deadline,
    Progress,
    track_call,
)
from verl.cluster.hangs.process_info import ProcessInfo, enable_stack_dumps, look
from verl.cluster.local import LocalActor

__all__ = ["register_actor", "report_ended_stall", "report_stall", "report_wait_start", "watch_for_hangs"]

CONTROLLER = "controller"
_SPACE = b"verl"
_LOOK_S, _ANSWER_S = 15.0, 20.0
_numbers = count()
_told: dict[tuple[str, CallTarget], float] = {}
_who = CONTROLLER


def register_actor(actor: Any, who: CallTarget) -> None:
    """Have an actor make itself known before it does anything else, and watch over its own waits from then on."""
    if not isinstance(actor, LocalActor):
        actor.__ray_call__.remote(_introduced, who)


def _introduced(_actor: Any, who: CallTarget) -> None:
    global _who
    _who = str(who)
    _settle(who)
    if not PENDING_CALLS.is_watched:
        Watchdog(PENDING_CALLS, _who, report_stall).start()


def _settle(who: CallTarget) -> None:
    enable_stack_dumps()
    context = ray.get_runtime_context()
    place = {"pid": os.getpid(), "node": context.get_node_id(), "host": ray.util.get_node_ip_address()}
    _put(f"process/{who}", place)


def report_ended_stall(action: str, target: CallTarget, deadline: Deadline, evidence: str) -> None:
    """Tell of a wait that is over and was dealt with where it was, of each kind now and then."""
    if time.monotonic() - _told.get((action, target), float("-inf")) > SAID_AGAIN_S:
        _told[action, target] = time.monotonic()
        since = time.time() - deadline.seconds
        report_stall(
            StalledCall(_who, action, (target,), deadline.seconds, since, deadline, over=True, evidence=evidence)
        )


def report_wait_start(action: str, target: CallTarget, deadline: Deadline) -> None:
    """Tell of a wait that begins now: nobody has expected it, for a process was lost."""
    report_stall(StalledCall(_who, action, (target,), 0.0, time.time(), deadline, over=False))


def report_stall(late: StalledCall) -> str:
    """From a worker to the controller; of what is over its deadline, the place of the report comes back."""
    name = f"{ray.get_runtime_context().get_worker_id()}-{next(_numbers)}"
    _put(f"late/{name}", late.to_json())
    until = time.monotonic() + _ANSWER_S
    while late.over and time.monotonic() < until:
        if (found := _take(f"report/{name}")) is not None:
            return str(found["path"])
        time.sleep(0.2)
    return ""


@contextlib.contextmanager
def watch_for_hangs(
    folder: Path, say: Callable[[str], None], warn: Callable[[str], None], turn: Deadline = DEFAULT_DEADLINES.reply
) -> Iterator[None]:
    """Inside of it, the controller's watchdog watches, and hears those of the workers. Reports go into `folder`.

    The event loop that it is entered on must turn once in `turn`, or it is blocked, which is told like any other wait.
    """
    me, loop, beat = CallTarget(CONTROLLER), asyncio.get_running_loop(), Progress()
    _settle(me)
    reporter = Reporter(
        folder, say, warn, ClusterInspector(), own_table=lambda: format_pending(CONTROLLER, PENDING_CALLS.active())
    )

    def hear() -> None:
        loop.call_soon_threadsafe(lambda: setattr(beat, "at", PENDING_CALLS.clock()))
        for key in internal_kv._internal_kv_list(_key("late/"), namespace=_SPACE):
            name = key.decode().rpartition("/")[2]
            if (found := _take(f"late/{name}")) is not None:
                late = StalledCall.from_json(found)
                path = reporter.report(late)
                if late.over:
                    _put(f"report/{name}", {"path": path})

    watchdog = Watchdog(PENDING_CALLS, CONTROLLER, reporter.report, hear)
    watchdog.start()
    try:
        with track_call("turn its event loop", target=me, deadline=turn, progress=beat):
            yield
    finally:
        watchdog.close()


class ClusterInspector:
    """The `ProcessInspector` of a run: inspects local processes directly, and others by a task on their node."""

    def places(self, targets: Sequence[CallTarget]) -> dict[CallTarget, ProcessLocation]:
        found = {target: _get(f"process/{target}") for target in targets}
        return {target: ProcessLocation(**place) for target, place in found.items() if place is not None}

    def look(self, places: Mapping[CallTarget, ProcessLocation]) -> dict[CallTarget, list[ProcessInfo]]:
        """An owner whose node does not answer is not among them."""
        by_node: dict[str, dict[CallTarget, int]] = defaultdict(dict)
        for target, place in places.items():
            by_node[place.node][target] = place.pid
        here = by_node.pop(ray.get_runtime_context().get_node_id(), {})
        tasks = {node: _look_from(node).remote(list(pids.values())) for node, pids in by_node.items()}
        seen = dict(zip(here, look(list(here.values())), strict=True))
        if tasks:
            ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=_LOOK_S)
        for node, task in tasks.items():
            with contextlib.suppress(ray.exceptions.RayError):
                seen |= dict(zip(by_node[node], ray.get(task, timeout=0), strict=True))
        return seen


def _look_from(node: str) -> Any:
    """`look`, to be called on a node."""
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=place)


def _key(name: str) -> bytes:
    """Runs share a cluster: what belongs to one bears the number of its job."""
    return f"{ray.get_runtime_context().get_job_id()}/{name}".encode()


def _put(name: str, value: Mapping[str, Any]) -> None:
    internal_kv._internal_kv_put(_key(name), json.dumps(value).encode(), namespace=_SPACE)


def _get(name: str) -> dict[str, Any] | None:
    found = internal_kv._internal_kv_get(_key(name), namespace=_SPACE)
    return None if found is None else json.loads(found)


def _take(name: str) -> dict[str, Any] | None:
    found = _get(name)
    if found is not None:
        internal_kv._internal_kv_del(_key(name), namespace=_SPACE)
    return found
