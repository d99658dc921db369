"""Counting the devices of nodes that are alive."""

from __future__ import annotations

import asyncio
import contextlib
import time

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


async def count_live_devices(device: str, wanted: int, *, timeout_s: float = 0.0, reply_s: float = 20.0) -> int:
    """Return the number of devices on responding nodes: once there are `wanted`, or after `timeout_s`.

    Each node is pinged, since Ray counts the devices of a dead node for a while.
    """
    resource = "CPU" if device == "cpu" else "GPU"
    until = time.monotonic() + timeout_s
    while True:
        count = await asyncio.to_thread(_count_responding, resource, reply_s)
        if count >= wanted or time.monotonic() >= until:
            return count
        await asyncio.sleep(min(5.0, timeout_s))


def _count_responding(resource: str, reply_s: float) -> int:
    ping = ray.remote(_ping)
    replies = {}
    for node in ray.nodes():
        if node["Alive"]:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            reply = ping.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote()
            replies[reply] = node["Resources"]
    ready, _ = ray.wait(list(replies), num_returns=len(replies), timeout=reply_s)
    return sum(int(replies[reply].get(resource, 0)) for reply in ready if _has_responded(reply))


def _ping() -> bool:
    return True


def _has_responded(reply: ray.ObjectRef) -> bool:
    with contextlib.suppress(RayError):  # its node has died
        return bool(ray.get(reply))
    return False
