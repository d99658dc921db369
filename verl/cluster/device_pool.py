"""A pool of devices: one bundle each, on which several actors may sit side by side."""

from __future__ import annotations

from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.cluster.hangs.pending_calls import DEFAULT_DEADLINES, CallTarget, Deadline, track_call
from verl.cluster.session import require
from verl.errors import EngineError

__all__ = ["DevicePool", "PlacementPool"]


class PlacementPool(Protocol):
    """Where the actors of a run are put: the devices of a cluster, or this process (`local.LocalPool`)."""

    count: int

    def spawn(
        self,
        actor: type,
        *args: Any,
        device: int | None = None,
        share: float = 0.0,
        is_async: bool = False,
        restarts: bool = False,
    ) -> Any:
        """A handle of a new actor with a `share` of a device, or beside them; it comes up while the caller goes on.

        `is_async`: its coroutines do, without a bound. `restarts`: Ray puts a new process in the place of one that
        died, under the same handle; somebody has to `start` that one again.
        """
        ...


class DevicePool:
    """`count` devices (GPUs, or CPU cores on a machine without) reserved together, or not at all."""

    def __init__(self, count: int, device: str, *, fix: str, deadline: Deadline = DEFAULT_DEADLINES.devices) -> None:
        self.count = count
        self.resource = "CPU" if device == "cpu" else "GPU"
        require(self.resource, count, fix)
        bundle = {self.resource: 1} if device == "cpu" else {"GPU": 1, "CPU": 1}
        self._group: PlacementGroup = placement_group([bundle] * count, strategy="PACK")
        with track_call(f"give {count} x {self.resource}", target=CallTarget("cluster"), deadline=deadline):
            ready, _ = ray.wait([self._group.ready()], timeout=deadline.seconds)
        if not ready:
            raise EngineError(
                f"{count} x {self.resource} were not free within {deadline.seconds:.0f} s ({deadline}); {fix}"
            )

    def spawn(
        self,
        actor: type,
        *args: Any,
        device: int | None = None,
        share: float = 0.0,
        is_async: bool = False,
        restarts: bool = False,
    ) -> Any:
        """See `PlacementPool.spawn`."""
        options = {"num_cpus": 0} if device is None else self._options(device, share)
        if is_async:
            options["max_concurrency"] = 100_000
        if restarts:
            options["max_restarts"] = -1
        return ray.remote(actor).options(**options).remote(*args)

    def _options(self, place: int, share: float) -> dict[str, Any]:
        """Ray options that put an actor on device `place` with a `share` of it; shares on a device sum to at most 1."""
        resources = {"num_cpus": share} if self.resource == "CPU" else {"num_gpus": share, "num_cpus": 0}
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        return {**resources, "scheduling_strategy": strategy}

    def close(self) -> None:
        """Give the devices back."""
        remove_placement_group(self._group)
