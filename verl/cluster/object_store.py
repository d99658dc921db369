"""The object store: putting and getting values, and errors that say what to free when it is full."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from verl.cluster.local import LocalRef
from verl.cluster.ray_private import get_session_folder
from verl.errors import StorageError

FULL_ERRORS = (ObjectStoreFullError, OutOfDiskError)


def put(value: Any) -> Any:
    """Put a value into the object store and return its reference."""
    if not ray.is_initialized():
        return LocalRef(value)
    with map_full_errors():
        return ray.put(value)


def get_all(references: Sequence[Any], timeout: float) -> list[Any]:
    """Return the referenced values. Blocks; raises `GetTimeoutError` after `timeout` seconds."""
    local = [reference.get() for reference in references if isinstance(reference, LocalRef)]
    if len(local) == len(references):
        return local
    with map_full_errors():
        return ray.get(list(references), timeout=timeout)


@contextmanager
def map_full_errors() -> Iterator[None]:
    """Raise Ray's errors about a full store or disk as `StorageError`."""
    try:
        yield
    except FULL_ERRORS as error:
        raise StorageError(describe_full_store()) from error


def describe_full_store() -> str:
    """Say which store and which disk are full, and what to free."""
    disk = ""
    if folder := get_session_folder():
        disk = f" ({folder}: {shutil.disk_usage(folder).free / 2**30:.1f} GiB are free)"
    return (
        f"the object store of {socket.gethostname()} is full and cannot spill to its disk{disk}. Free space on that "
        "disk, or set RAY_TMPDIR to a folder on a larger one; give the store more memory "
        "(ray_kwargs.ray_init.object_store_memory); or hold fewer samples (data.train_batch_size, "
        "actor_rollout_ref.rollout.n, trainer.max_staleness). Rerun the command to resume."
    )
