"""Connecting to a Ray cluster, or starting one on this machine."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.utils import get_ray_address_file

from verl.errors import EngineError

__all__ = ["connect", "detect_device", "disconnect", "require", "write_timeline"]

STARTS = 2
TERMINATED = 128 + signal.SIGTERM
_ANSWER_S = 5.0
_OF_THE_PROGRAM = "this program had started Ray itself: the run takes place there (ray_kwargs has no effect)"
_OF_A_START = ("num_cpus", "num_gpus", "resources", "object_store_memory")
_joined_here = False

LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")

OWN_CLUSTER = {
    "OMP_NUM_THREADS": "1",  # several processes share the cores
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_gcs_server_port_wait_time_s": "120",
    # Ray's pages for Prometheus ask for no token, and nobody reads them: these numbers are no ports.
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}
"""Environment of a cluster that is started here, which its processes inherit; what the user has set stays."""

ON_LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
    "NCCL_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
    "VLLM_HOST_IP": LOOPBACK,
}
"""The same, of one that listens on this machine alone."""


def connect(options: Mapping[str, Any]) -> str:
    """Join the cluster that `options` or RAY_ADDRESS name, else the one that `ray start` made here; else start one.

    Returns what the user should know: which cluster it is, where it is not one of this run's own. One that the program
    around this had joined is used, and is not ours to leave. The address "local" always starts one.

    One that is started here listens on loopback, unless `options` name another `_node_ip_address`, and asks for a token
    that only its own processes know, unless RAY_AUTH_MODE=disabled.
    """
    global _joined_here
    if ray.is_initialized():
        return "" if _joined_here else _OF_THE_PROGRAM
    named = options.get("address") or os.environ.get("RAY_ADDRESS")
    address = named or _started_here()
    if address is None or address == "local":
        _start(options)
        told = ""
    else:
        told = f"the Ray cluster at {address} is joined"
        if not named:
            told += ", which `ray start` made (one of this run's own: ray_kwargs.ray_init.address=local)"
        if unused := [f"ray_kwargs.ray_init.{name}" for name in _OF_A_START if name in options]:
            told += f"; {', '.join(unused)}: no effect on a cluster that is there already"
        _join(address, {name: value for name, value in options.items() if name not in _OF_A_START})
    _joined_here = True
    return told


def _start(options: Mapping[str, Any]) -> None:
    _inherit(OWN_CLUSTER)
    _ask_for_a_token()
    arguments = {"include_dashboard": False, "_node_ip_address": LOOPBACK} | dict(options) | {"address": "local"}
    if "RAY_TMPDIR" not in os.environ:
        arguments.setdefault("_temp_dir", _own_folder())
    if arguments["_node_ip_address"] == LOOPBACK:
        _stay_on_loopback()
    fix = "see whether the machine is very busy, out of memory or out of space in /tmp, and try again"
    _init(arguments, fix, tries=STARTS)


def _join(address: str, options: Mapping[str, Any]) -> None:
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # as `ray start` does, and `ray.init` does not
    fix = (
        f"is a cluster running at {address} (ray status), and is its token here too (RAY_AUTH_TOKEN, or the same "
        "~/.ray/auth_token)? Start one with 'ray start --head', or take the address away "
        "(ray_kwargs.ray_init.address, RAY_ADDRESS; 'local') for a cluster of this run's own"
    )
    _init({**options, "address": address}, fix, tries=1)


def _started_here() -> str | None:
    """The cluster that `ray start` made or joined on this machine, if it still answers.

    Its address lies in a file in a folder that everybody can write to. Whoever leads us into a cluster of theirs runs
    code as us: only this user and root are believed.
    """
    file = Path(get_ray_address_file(None))
    try:
        if file.lstat().st_uid not in (os.getuid(), 0):
            return None
        address = file.read_text().strip()
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError):  # there is none, or it has gone and its file is still there
        return None
    return address


def _inherit(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _ask_for_a_token() -> None:
    """Ray asks for a token in the clusters that it starts; this gives it one of this run's own.

    It travels in the environment of the cluster's processes, which no other user can read, and is in no file. Left to
    itself Ray keeps one token for all clusters, in a file in the home directory.
    """
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _stay_on_loopback() -> None:
    """Make Ray mean it when it is told `_node_ip_address="127.0.0.1"`.

    Ray 2.60 puts the machine's own address in its place (`resolve_ip_for_localhost`), except where it cannot be a
    cluster: on macOS and Windows. It is told that this is such a place: its processes by the environment, and this one,
    which read the environment when it imported Ray, by the constant. To go when `ray.init` can listen on loopback.
    """
    _inherit(ON_LOOPBACK)
    ray_constants.ENABLE_RAY_CLUSTER = False


def _own_folder() -> str:
    """Where Ray keeps logs, sockets and spilled objects: below a folder that this user alone can enter.

    Ray opens its own folders to everybody, again and again.
    """
    folder = Path(tempfile.gettempdir(), f"verl-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EngineError(
            f"{folder}: must be a folder that only you can enter, since Ray's logs and sockets lie in it; take it away "
            f"or chmod 700 it, or name another folder by RAY_TMPDIR"
        )
    return str(folder / "ray")


def _init(arguments: Mapping[str, Any], fix: str, tries: int) -> None:
    """A node must be up within 30 s, a limit of Ray's own that a machine at its limits does not always keep."""
    quiet = {"ignore_reinit_error": True, "log_to_driver": False, "logging_level": logging.ERROR}
    while True:
        try:
            with _own_sigterm():
                ray.init(**quiet | dict(arguments))
            return
        except Exception as error:  # Ray raises bare exceptions here
            tries -= 1
            ray.shutdown()
            if not tries:
                raise EngineError(f"Ray did not start: {error}\n{fix}") from error


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """`ray.init` puts a handler in the place of whatever heard SIGTERM, which exits with 15, a code that nobody knows.
    What was there comes back; where nothing was, the process still ends in good order, with the code that shells give.
    """
    if threading.current_thread() is not threading.main_thread():  # nor does Ray touch it there
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as end:  # by Ray's handler, while it started
        raise SystemExit(TERMINATED if end.code == signal.SIGTERM else end.code) from end
    finally:
        signal.signal(signal.SIGTERM, _end if before in (None, signal.SIG_DFL) else before)


def _end(*_: Any) -> None:
    sys.exit(TERMINATED)


def disconnect() -> None:
    """Leave the cluster that `connect` joined; one that it started ends with its processes."""
    global _joined_here
    if ray.is_initialized() and _joined_here:
        ray.shutdown()
    _joined_here = False


def write_timeline(path: Path) -> None:
    """What Ray knows of its tasks and actors so far, for Perfetto or chrome://tracing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ray.timeline(str(path))


def detect_device() -> str:
    """ "cuda" where the cluster has GPUs, else "cpu"."""
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def require(resource: str, amount: int, fix: str) -> None:
    """Raise at once when the cluster can never offer `amount` of `resource`, instead of waiting for ever."""
    available = ray.cluster_resources().get(resource, 0)
    if available < amount:
        raise EngineError(f"the run needs {amount} {resource} and the cluster has {available:g}; {fix}")
