"""The process group of the ranks of an engine. The only module that chooses a collective backend."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout, default_pg_timeout

from verl.errors import EngineError

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Device type -> backend. Numbers in host memory (totals, metrics) always use gloo."""

_LOOPBACK = "127.0.0.1"
_timeout: timedelta | None = None  # of the process group that this process has joined


def init_process_group(
    rank: int,
    world_size: int,
    address: str,
    port: int,
    device: str = "cpu",
    timeout_seconds: float = 600.0,
    listener: socket.socket | None = None,
    own_address: str | None = None,
) -> None:
    """Join `world_size` processes that use the same address and port; return when all have joined.

    Rank 0 listens on that address only, on `listener` if given. A single rank may use port 0, which is any.
    `own_address` is the address at which other ranks reach this one; by default loopback if `address` is.
    """
    global _timeout
    kind = torch.device(device).type
    if kind not in BACKENDS:
        raise EngineError(f"device {device!r}: has no collective backend; use one of {', '.join(BACKENDS)}")
    _bind_to(own_address or address if address == _LOOPBACK else own_address)
    timeout = _timeout = timedelta(seconds=timeout_seconds)
    try:
        server = listener
        if rank == 0 and server is None:  # without a socket the store would listen on all addresses
            server = socket.create_server((address, port), backlog=world_size)
        descriptor = server.detach() if rank == 0 and server is not None else None
        store = dist.TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=descriptor)
        dist.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (dist.DistError, OSError) as error:
        raise EngineError(
            f"rank {rank} of {world_size} could not join {address}:{port} within {timeout_seconds:g} s: {error}; "
            "check that every rank has started and can reach that address"
        ) from error


def _bind_to(address: str | None) -> None:
    """Let gloo listen on the network interface that has an address, unless the user has named one.

    By default it listens on the address of the host name, at which other machines may not reach it: on Debian that is
    127.0.1.1. NCCL finds interfaces by itself, and is limited to loopback only.
    """
    interfaces = psutil.net_if_addrs().items()
    name = next((name for name, addresses in interfaces if any(each.address == address for each in addresses)), None)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if address == _LOOPBACK:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def get_timeout() -> timedelta:
    """Return how long a collective may take: as long as the run allows, or torch's default outside of one."""
    return _timeout or default_pg_timeout


def build_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of all ranks, whose groups have the timeout of the process group instead of torch's default."""
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    if _timeout is not None:
        for group in mesh.get_all_groups():
            _set_pg_timeout(_timeout, group)
    return mesh


def close_process_group() -> None:
    """Leave the process group, if this process has joined one, so that it may join another."""
    if dist.is_initialized():
        dist.destroy_process_group()


def count_node_ranks() -> int:
    """Return how many ranks run on the machine of this one. Collective."""
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return names.count(socket.gethostname())


def check_divides(name: str, size: int, world_size: int) -> None:
    """Raise unless groups of `size` ranks cover all ranks."""
    if size < 1 or world_size % size:
        raise EngineError(f"{name}: {size} does not divide the {world_size} train ranks")
