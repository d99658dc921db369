"""Which machines of the cluster are still there."""

from __future__ import annotations

import asyncio
import time

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["count_live_devices"]


async def count_live_devices(device: str, wanted: int, *, patience_s: float = 0.0, reply_s: float = 20.0) -> int:
    """How many devices the machines have that still answer: as soon as they are enough, or after `patience_s`.

    Ray counts those of a machine that has just died for a while; so each machine is asked.
    """
    resource = "CPU" if device == "cpu" else "GPU"
    until = time.monotonic() + patience_s
    while True:
        there = await asyncio.to_thread(_answering, resource, reply_s)
        if there >= wanted or time.monotonic() >= until:
            return there
        await asyncio.sleep(min(5.0, patience_s))


def _answering(resource: str, reply_s: float) -> int:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    here = ray.remote(_here)
    strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    asked = {
        here.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(): node["Resources"]
        for strategy, node in zip(strategies, nodes, strict=True)
    }
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=reply_s)
    return sum(int(asked[one].get(resource, 0)) for one in answered if _came(one))


def _here() -> bool:
    return True


def _came(reference: ray.ObjectRef) -> bool:
    try:
        return bool(ray.get(reference))
    except RayError:  # its machine went in the meantime
        return False
