"""Connecting to a Ray cluster, or starting one on this machine."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from verl.cluster.ray_private import allow_loopback, get_address_file, load_auth_token, separate_process_groups
from verl.errors import EngineError
from verl.private_files import get_user_folder, make_folder

START_ATTEMPTS = 2
TERMINATED = 128 + signal.SIGTERM
_PROBE_S, _RECONNECT_S = 5.0, 5.0
_START_OPTIONS = ("num_cpus", "num_gpus", "resources", "object_store_memory")
_is_ours = False  # this process was connected by `connect`
_owns_cluster = False  # which it has started

LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")

CLUSTER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # several processes share the cores
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_gcs_server_port_wait_time_s": "120",
    # Ray's Prometheus endpoints require no token and are not used: -1 disables them.
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}
"""Inherited by the processes of a cluster that is started here; variables that the user has set take precedence."""

LOOPBACK_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
    "NCCL_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
    "VLLM_HOST_IP": LOOPBACK,
}
"""Additional variables for a cluster that listens on loopback only."""


def connect(options: Mapping[str, Any]) -> str:
    """Join the cluster that `options` or RAY_ADDRESS name, or that `ray start` made here; otherwise start one.

    The address "local" always starts one. It listens on loopback, unless `options` name another `_node_ip_address`, and
    requires a token that only its own processes have, unless RAY_AUTH_MODE=disabled. If the program has initialized Ray
    itself, that cluster is used, and `disconnect` leaves it alone.

    Returns:
        A note for the user on which cluster is used; empty if it was started here.
    """
    global _is_ours, _owns_cluster
    if ray.is_initialized():
        return "" if _is_ours else "using the Ray cluster that this program had started (ray_kwargs has no effect)"
    named = options.get("address") or os.environ.get("RAY_ADDRESS")
    address = named or _find_local_cluster()
    note = ""
    if address is None or address == "local":
        _start(options)
    else:
        note = f"joined the Ray cluster at {address}"
        if not named:
            note += ", started by `ray start` (for a separate one: ray_kwargs.ray_init.address=local)"
        if unused := [f"ray_kwargs.ray_init.{name}" for name in _START_OPTIONS if name in options]:
            note += f"; {', '.join(unused)}: no effect on an existing cluster"
        _join(address, {name: value for name, value in options.items() if name not in _START_OPTIONS})
    _is_ours, _owns_cluster = True, not note
    return note


async def reconnect(options: Mapping[str, Any], timeout_s: float) -> str:
    """`connect` after the cluster was lost: wait up to `timeout_s` for one at the named address."""
    clock = asyncio.get_running_loop().time
    until = clock() + timeout_s
    while True:
        try:
            return connect(options)
        except EngineError:
            if clock() >= until:
                raise
            await asyncio.sleep(_RECONNECT_S)


def is_connected() -> bool:
    """Return whether this process is still connected to the cluster that `connect` joined or started."""
    return _is_ours and ray.is_initialized()


def owns_cluster() -> bool:
    """Return whether this process started the cluster, so that no other process restarts parts of it."""
    return is_connected() and _owns_cluster


def _start(options: Mapping[str, Any]) -> None:
    _set_defaults(CLUSTER_ENVIRONMENT)
    _create_token()
    arguments = {"include_dashboard": False, "_node_ip_address": LOOPBACK} | dict(options) | {"address": "local"}
    if "RAY_TMPDIR" not in os.environ:
        arguments.setdefault("_temp_dir", str(get_user_folder() / "ray"))  # Ray opens its own folders to everybody
    if arguments["_node_ip_address"] == LOOPBACK:
        _set_defaults(LOOPBACK_ENVIRONMENT)
        allow_loopback()
    fix = "Check whether the machine is overloaded, out of memory or out of space in /tmp, and try again."
    _init(arguments, fix, attempts=START_ATTEMPTS)


def _join(address: str, options: Mapping[str, Any]) -> None:
    load_auth_token()
    fix = (
        f"Check that a cluster is running at {address} (ray status) and that its token is available here "
        "(RAY_AUTH_TOKEN, or the same ~/.ray/auth_token). Start one with 'ray start --head', or remove the address "
        "(ray_kwargs.ray_init.address, RAY_ADDRESS; or set it to 'local') to start a cluster for this run."
    )
    _init({**options, "address": address}, fix, attempts=1)


def _find_local_cluster() -> str | None:
    """Return the address of the cluster that `ray start` made or joined on this machine, if it responds.

    The address file is in a world-writable folder, and joining a cluster means running its code: only files of this
    user and root are trusted.
    """
    file = get_address_file()
    try:
        if file.lstat().st_uid not in (os.getuid(), 0):
            return None
        address = file.read_text().strip()
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
    except (OSError, ValueError):  # no file, or a stale one
        return None
    return address


def _set_defaults(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _create_token() -> None:
    """Give the new cluster its own token, instead of Ray's, which is one for all clusters in a file in the home folder.

    The token is passed in the environment, which other users cannot read, and is never written to a file.
    """
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _init(arguments: Mapping[str, Any], fix: str, attempts: int) -> None:
    """Call `ray.init`, which fails on a busy machine if a node takes more than 30 s to start."""
    quiet = {"ignore_reinit_error": True, "log_to_driver": False, "logging_level": logging.ERROR}
    while True:
        try:
            with _keep_sigterm_handler(), separate_process_groups():
                ray.init(**quiet | dict(arguments))
            return
        except Exception as error:  # Ray raises bare exceptions here
            attempts -= 1
            ray.shutdown()
            if not attempts:
                raise EngineError(f"Ray did not start: {error}\n{fix}") from error


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restore the SIGTERM handler, which `ray.init` replaces by one that exits with code 15.

    If there was none, SIGTERM exits in an orderly manner with the code that shells use.
    """
    if threading.current_thread() is not threading.main_thread():  # where Ray sets no handler
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:  # from Ray's handler, during the start
        raise SystemExit(TERMINATED if error.code == signal.SIGTERM else error.code) from error
    finally:
        has_none = before in (None, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, (lambda *_: sys.exit(TERMINATED)) if has_none else before)


def disconnect() -> None:
    """Leave the cluster that `connect` joined, or stop the one that it started."""
    global _is_ours
    if ray.is_initialized() and _is_ours:
        ray.shutdown()
    _is_ours = False


def write_timeline(path: Path) -> None:
    """Write Ray's timeline of tasks and actors for Perfetto or chrome://tracing."""
    make_folder(path.parent)
    ray.timeline(str(path))


def detect_device() -> str:
    """Return "cuda" if the cluster has GPUs, else "cpu"."""
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def require_resource(resource: str, amount: int, fix: str) -> None:
    """Raise if the cluster does not have `amount` of `resource`, instead of waiting for it forever."""
    available = ray.cluster_resources().get(resource, 0)
    if available < amount:
        raise EngineError(f"The run needs {amount} {resource} and the cluster has {available:g}; {fix}")
