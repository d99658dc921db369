"""Reserved devices, one placement-group bundle each, which several actors may share; and the devices of live nodes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from verl.cluster.hangs.pending_calls import DEFAULT_TIMEOUTS, CallTarget, Timeout, track_call
from verl.cluster.local import LocalPool
from verl.cluster.session import is_connected, require_resource
from verl.errors import EngineError

_UNLIMITED_CONCURRENCY = 100_000
_COUNT_INTERVAL_S = 5.0


class DevicePool:
    """Reserves `count` devices (GPUs, or CPU cores if `device` is "cpu"), all of them or none.

    Devices come in blocks of `width` adjacent ones; the devices of a block are on one node, and so are adjacent blocks
    as far as possible: groups of ranks that exchange much are formed of adjacent ranks.
    """

    def __init__(self, count: int, device: str, *, width: int = 1) -> None:
        """Ask for devices, also if the cluster does not have as many yet; see `reserve` and `is_reserved`."""
        self.count, self._width = count, width
        self.resource = "CPU" if device == "cpu" else "GPU"
        bundle = {self.resource: width} if device == "cpu" else {"GPU": width, "CPU": width}
        self._group: PlacementGroup = placement_group([bundle] * (count // width), strategy="PACK")
        self._ready = self._group.ready()

    @classmethod
    def reserve(
        cls, count: int, device: str, *, fix: str, width: int = 1, timeout: Timeout = DEFAULT_TIMEOUTS.devices
    ) -> DevicePool:
        """Wait for devices; raise if the cluster does not have as many, or others use them for too long."""
        resource = "CPU" if device == "cpu" else "GPU"
        require_resource(resource, count, fix)
        pool = cls(count, device, width=width)
        with track_call(f"reserve {count} x {resource}", target=CallTarget("cluster"), timeout=timeout):
            if not pool.is_reserved(timeout.seconds):
                raise EngineError(
                    f"Timed out after {timeout.seconds:.0f} s waiting for {count} free {resource}s ({timeout}); {fix}"
                )
        return pool

    def is_reserved(self, wait_s: float = 0.0) -> bool:
        """Return whether all devices are reserved, after waiting for them for at most `wait_s`."""
        return bool(ray.wait([self._ready], timeout=wait_s)[0])

    def spawn(
        self,
        actor: type,
        *args: Any,
        device: int | None = None,  # index; None: it uses none
        share: float = 0.0,  # how many devices it owns, from this one on; 0: it shares those of other actors
        is_async: bool = False,  # run any number of its coroutines concurrently
        restarts: bool = False,  # let Ray replace its process when it dies; a caller must start the new one again
        nsys: Mapping[str, str] | None = None,  # options of `nsys profile`, to run its process under it
    ) -> Any:
        """Return the handle of a new actor, created with `args`, without waiting for its process."""
        options: dict[str, Any] = {"num_cpus": 0}
        if device is not None:
            options["num_cpus" if self.resource == "CPU" else "num_gpus"] = share
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._blocks[device // self._width]
            )
        if nsys:
            options["runtime_env"] = {"nsight": dict(nsys)}
        if is_async:
            options["max_concurrency"] = _UNLIMITED_CONCURRENCY
        if restarts:
            options["max_restarts"] = -1
        return ray.remote(actor).options(**options).remote(*args)

    @cached_property
    def _blocks(self) -> list[int]:
        """The index of each block's bundle. Only known once they are reserved."""
        return sort_by_node(self._bundle_nodes)

    @property
    def _bundle_nodes(self) -> list[str]:
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        return [nodes[index] for index in range(len(nodes))]

    def list_nodes(self) -> list[str]:
        """Return the id of each device's node."""
        nodes = self._bundle_nodes
        return [nodes[index] for index in self._blocks for _ in range(self._width)]

    def is_one_machine(self) -> bool:
        """Return whether all nodes of the cluster run on one machine, and so share its memory."""
        return len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}) == 1

    def close(self) -> None:
        """Release the devices, unless that is left to the end of the connection: without a GCS it would not return."""
        if ray.is_initialized() and not is_connected():
            remove_placement_group(self._group)


def sort_by_node(nodes: Sequence[str]) -> list[int]:
    """Return the indices of bundles, given the node of each, so that those of a node follow each other.

    Ray packs bundles, but in no order of nodes. Nodes with more bundles come first: groups of ranks then begin where a
    node begins, if groups fit into the larger nodes.

    >>> sort_by_node(["a", "b", "c", "b", "a", "b"])
    [1, 3, 5, 0, 4, 2]
    """
    counts = Counter(nodes)  # in the order of their first bundle, which a stable sort keeps
    ranks = {node: rank for rank, node in enumerate(sorted(counts, key=lambda node: -counts[node]))}
    return sorted(range(len(nodes)), key=lambda index: ranks[nodes[index]])


PlacementPool = DevicePool | LocalPool
"""Starts the actors of a run: on the devices of a cluster, or in this process."""


def run_on_node(node: str, function: Callable[..., Any], *args: Any) -> ray.ObjectRef:
    """Start a task on a node; it fails if the node does not respond."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(*args)


async def count_live_devices(device: str, wanted: int, *, timeout_s: float = 0.0, reply_s: float = 20.0) -> int:
    """Wait until responding nodes have `wanted` devices, or for `timeout_s`; return the number of devices.

    Each node is pinged, since Ray counts the devices of a dead node for a while.
    """
    resource = "CPU" if device == "cpu" else "GPU"
    until = time.monotonic() + timeout_s
    while True:
        count = await asyncio.to_thread(_count_responding, resource, reply_s)
        if count >= wanted or time.monotonic() >= until:
            return count
        await asyncio.sleep(min(_COUNT_INTERVAL_S, timeout_s))


def _count_responding(resource: str, reply_s: float) -> int:
    replies = {run_on_node(node["NodeID"], lambda: True): node["Resources"] for node in ray.nodes() if node["Alive"]}
    ready, _ = ray.wait(list(replies), num_returns=len(replies), timeout=reply_s)
    count = 0
    for reply in ready:
        with contextlib.suppress(RayError):  # its node has died
            ray.get(reply)
            count += int(replies[reply].get(resource, 0))
    return count
