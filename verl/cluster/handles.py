"""References and handles of actors, with Ray or in one process (`local.py`): whoever uses them need not know which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from verl.cluster.local import LocalActor, LocalRef

__all__ = ["end", "get_all", "get_node_address", "put"]


def put(value: Any) -> Any:
    """Lay something into the object store; without Ray it stays where it is."""
    return ray.put(value) if ray.is_initialized() else LocalRef(value)


def get_all(references: Sequence[Any], timeout: float) -> list[Any]:
    """What the references refer to. Blocks; `GetTimeoutError` when it takes longer."""
    kept = [reference.get() for reference in references if isinstance(reference, LocalRef)]
    return kept if len(kept) == len(references) else ray.get(list(references), timeout=timeout)


def end(actor: Any, *, restarts: bool = False) -> None:
    """End an actor's process, for good unless Ray is to put a new one in its place."""
    if isinstance(actor, LocalActor):
        actor.end()
    else:
        ray.kill(actor, no_restart=not restarts)


def get_node_address() -> str:
    """Under which other processes of the run reach this one."""
    return ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
