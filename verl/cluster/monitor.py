"""Watches the parts of Ray that a controller cannot live without: the GCS, and the raylet of its machine.

Ray ends the process of a driver that has not reached the GCS for 60 s, without a message that names the cause. Here the
loss is noticed earlier and becomes a `ProcessLostError`, after which a run starts or joins another cluster and resumes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import ray

from verl.cluster.ray_private import disable_auto_init
from verl.cluster.session import disconnect, is_connected, owns_cluster
from verl.errors import ProcessLostError

CHECK_S = 2.0
REPLY_S = 10.0
GRACE_PERIOD_S = 5.0
GCS_GRACE_PERIOD_S = 40.0
"""Seconds without a connection. A cluster that was not started here may restart its GCS, and runs go on; Ray itself
waits for 60 s."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A part of Ray that has to accept connections. It counts as lost after `grace_period_s` without a connection."""

    name: str
    host: str
    port: int
    grace_period_s: float

    def __str__(self) -> str:
        return f"{self.name} at {self.host}:{self.port}"


def find_endpoints() -> list[Endpoint]:
    """Return the parts of Ray that this controller depends on; asks the GCS."""
    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    endpoints = [Endpoint("Ray's GCS", host, int(port), GRACE_PERIOD_S if owns_cluster() else GCS_GRACE_PERIOD_S)]
    for node in ray.nodes():
        if node["NodeID"] == context.get_node_id():
            name = f"the raylet of this machine ({node['NodeManagerHostname']})"
            endpoints.append(Endpoint(name, node["NodeManagerAddress"], node["NodeManagerPort"], GRACE_PERIOD_S))
    return endpoints


async def can_connect(endpoint: Endpoint) -> bool:
    """Return whether a process listens at the endpoint."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(endpoint.host, endpoint.port), REPLY_S)
    except (TimeoutError, OSError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def wait_for_loss(
    endpoints: list[Endpoint], check: Callable[[Endpoint], Awaitable[bool]] = can_connect, interval_s: float = CHECK_S
) -> str:
    """Return what is lost, once a part of Ray has not accepted a connection for longer than its grace period."""
    clock = asyncio.get_running_loop().time
    last_seen = {endpoint: clock() for endpoint in endpoints}
    while True:
        await asyncio.sleep(interval_s)
        for endpoint in endpoints:
            if await check(endpoint):
                last_seen[endpoint] = clock()
            elif (seconds := clock() - last_seen[endpoint]) > endpoint.grace_period_s:
                return f"{endpoint} has not accepted a connection for {seconds:.0f} s: its process has died"


@asynccontextmanager
async def watch_cluster() -> AsyncIterator[None]:
    """Interrupt the block with a `ProcessLostError` when the cluster that it connects to is lost.

    The process leaves the cluster first: calls to it would not return, and Ray would soon end this process.
    """
    task, losses = asyncio.current_task(), []
    assert task is not None

    async def watch() -> None:
        while not is_connected():
            await asyncio.sleep(CHECK_S)
        losses.append(await wait_for_loss(await asyncio.to_thread(find_endpoints)))
        disable_auto_init()
        disconnect()
        task.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not losses:
            raise
        task.uncancel()
        raise ProcessLostError(losses[0]) from None
    finally:
        watching.cancel()
