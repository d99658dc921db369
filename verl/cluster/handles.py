"""Object references and actor handles, the same with Ray or within one process (`local.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from verl.cluster.local import LocalActor, LocalRef


def put(value: Any) -> Any:
    """Put a value into the object store and return its reference."""
    return ray.put(value) if ray.is_initialized() else LocalRef(value)


def get_all(references: Sequence[Any], timeout: float) -> list[Any]:
    """Return the referenced values. Blocks; raises `GetTimeoutError` after `timeout` seconds."""
    local = [reference.get() for reference in references if isinstance(reference, LocalRef)]
    return local if len(local) == len(references) else ray.get(list(references), timeout=timeout)


def kill_actor(actor: Any, *, restarts: bool = False) -> None:
    """Kill an actor's process; with `restarts` Ray starts a new one under the same handle."""
    if isinstance(actor, LocalActor):
        actor._exit()
    else:
        ray.kill(actor, no_restart=not restarts)


def get_node_address() -> str:
    """Return the address at which other processes of the run reach this one."""
    return ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
