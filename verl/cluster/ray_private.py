"""All uses of Ray's private modules: what Ray 2.60 has no public API for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ray._private import auto_init_hook, ray_constants, services
from ray._private import state as ray_state
from ray._private import worker as ray_worker
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.utils import get_ray_address_file
from ray.core.generated.common_pb2 import NODE_OUT_OF_MEMORY  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import WorkerTableData  # type: ignore[attr-defined]


def get_address_file() -> Path:
    """Return the file in which `ray start` stores the address of this machine's cluster.

    `ray.init(address="auto")` reads it, too, but trusts a file of any owner.
    """
    return Path(get_ray_address_file(None))


def get_session_folder() -> str | None:
    """Return the folder of logs, sockets and spilled objects of the cluster on this machine; None if unknown."""
    node = ray_worker.global_worker.node
    return None if node is None else str(node.get_session_dir_path())


def load_auth_token() -> None:
    """Load this user's cluster token, if there is one, as `ray start` does and `ray.init` does not."""
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def disable_auto_init() -> None:
    """Make calls without a connection fail, instead of starting another cluster."""
    auto_init_hook.enable_auto_connect = False


def find_memory_death(actor_id: str) -> str | None:
    """Return Ray's report on the last process of an actor that it ended for lack of memory; None if there is none."""
    if not ray_worker.global_worker.connected:
        return None
    table = ray_state.state._connect_and_get_accessor().get_worker_table()
    workers = [WorkerTableData.FromString(each) for each in table]
    ended = [each for each in workers if each.exit_type == NODE_OUT_OF_MEMORY and actor_id in each.exit_detail]
    return max(ended, key=lambda each: each.end_time_ms).exit_detail if ended else None


@contextmanager
def separate_process_groups() -> Iterator[None]:
    """Start each process of a new cluster in a process group of its own.

    `timeout`, batch systems and terminals signal the whole process group of a command: this must reach the controller,
    which saves and ends the cluster, and not the processes that it needs for this.
    """
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]


def allow_loopback() -> None:
    """Make `ray.init(_node_ip_address="127.0.0.1")` listen on loopback.

    Ray replaces it by the machine's address (`resolve_ip_for_localhost`), except where it supports no multi-node
    clusters: on macOS and Windows. This constant says so of this process; the cluster's own get it by the environment
    (`RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER`). Remove it when `ray.init` can listen on loopback.
    """
    ray_constants.ENABLE_RAY_CLUSTER = False
