"""Connecting to a Ray cluster, or starting one on this machine."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

import ray

from verl.errors import EngineError

__all__ = ["connect", "detect_device", "disconnect", "free_port", "require"]

STARTS = 2


def connect(options: Mapping[str, Any]) -> None:
    """Join the cluster that `options` or RAY_ADDRESS name; without either, start one here, for this run alone."""
    if ray.is_initialized():
        return
    arguments: dict[str, Any] = {
        "ignore_reinit_error": True,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    address = options.get("address", os.environ.get("RAY_ADDRESS"))
    if address is None:
        # Workers inherit this; one OpenMP thread each, for several processes share the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        arguments["_node_ip_address"] = "127.0.0.1"
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")
    else:
        arguments.pop("include_dashboard")
    try:
        _init(arguments | dict(options), tries=STARTS if address is None else 1)
    except Exception as error:  # Ray raises bare exceptions here
        mend = (
            "see whether the machine is very busy, out of memory or out of space in /tmp, and try again"
            if address is None
            else f"is a cluster running at {address} (ray status)? Start one with 'ray start --head', or take the "
            "address away (ray_kwargs.ray_init.address, RAY_ADDRESS) for a cluster of this run's own"
        )
        raise EngineError(f"Ray did not start: {error}\n{mend}") from error


def _init(arguments: Mapping[str, Any], tries: int) -> None:
    """A node must be up within 30 s, a limit of Ray's own that a machine at its limits does not always keep."""
    while True:
        try:
            ray.init(**arguments)
            return
        except Exception:
            tries -= 1
            ray.shutdown()
            if not tries:
                raise


def disconnect() -> None:
    """Leave the cluster; one that `connect` started ends with its processes."""
    if ray.is_initialized():
        ray.shutdown()


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def detect_device() -> str:
    """ "cuda" where the cluster has GPUs, else "cpu"."""
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def require(resource: str, amount: int, mend: str) -> None:
    """Raise at once when the cluster can never offer `amount` of `resource`, instead of waiting for ever."""
    available = ray.cluster_resources().get(resource, 0)
    if available < amount:
        raise EngineError(f"the run needs {amount} {resource} and the cluster has {available:g}; {mend}")
