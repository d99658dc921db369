"""Reserved devices, one placement-group bundle each, which several actors may share."""

from __future__ import annotations

from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.cluster.hangs import DEFAULT_DEADLINES, CallTarget, Deadline, track_call
from verl.cluster.session import require_resource
from verl.errors import EngineError

_UNLIMITED_CONCURRENCY = 100_000


class PlacementPool(Protocol):
    """Starts the actors of a run: on the devices of a cluster, or in this process (`local.LocalPool`)."""

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
        """Return the handle of a new actor, without waiting for its process.

        Args:
            actor: its class, created with `args`.
            device: index of the device that it uses; None: it uses none.
            share: fraction of the device; those of all its actors sum to at most 1.
            is_async: run any number of its coroutines concurrently.
            restarts: let Ray replace its process when it dies; the new one must be started again by a caller.
        """
        ...


class DevicePool:
    """`count` devices (GPUs, or CPU cores if `device` is "cpu"), reserved all or none."""

    def __init__(self, count: int, device: str, *, fix: str, deadline: Deadline = DEFAULT_DEADLINES.devices) -> None:
        self.count = count
        self.resource = "CPU" if device == "cpu" else "GPU"
        require_resource(self.resource, count, fix)
        bundle = {self.resource: 1} if device == "cpu" else {"GPU": 1, "CPU": 1}
        self._group: PlacementGroup = placement_group([bundle] * count, strategy="PACK")
        with track_call(f"reserve {count} x {self.resource}", target=CallTarget("cluster"), deadline=deadline):
            ready, _ = ray.wait([self._group.ready()], timeout=deadline.seconds)
        if not ready:
            raise EngineError(
                f"Timed out after {deadline.seconds:.0f} s waiting for {count} free {self.resource}s ({deadline}); "
                f"{fix}"
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
        options: dict[str, Any] = {"num_cpus": 0}
        if device is not None:
            options["num_cpus" if self.resource == "CPU" else "num_gpus"] = share
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=device
            )
        if is_async:
            options["max_concurrency"] = _UNLIMITED_CONCURRENCY
        if restarts:
            options["max_restarts"] = -1
        return ray.remote(actor).options(**options).remote(*args)

    def close(self) -> None:
        """Release the devices."""
        remove_placement_group(self._group)
