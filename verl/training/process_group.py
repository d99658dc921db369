"""The process group of the ranks of an engine. The only module that chooses a collective backend."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from verl.errors import EngineError

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Device type -> backend. Numbers in host memory (totals, metrics) always use gloo."""


def init_process_group(
    rank: int,
    world_size: int,
    address: str,
    port: int,
    device: str = "cpu",
    timeout_seconds: float = 600.0,
    listener: socket.socket | None = None,
) -> None:
    """Join `world_size` processes that use the same address and port; return when all have joined.

    Rank 0 listens on that address only, on `listener` if given. With 127.0.0.1 no rank listens on any other address.
    A single rank may use port 0, which is any.
    """
    kind = torch.device(device).type
    if kind not in BACKENDS:
        raise EngineError(f"device {device!r}: has no collective backend; use one of {', '.join(BACKENDS)}")
    if address == "127.0.0.1":  # else gloo and NCCL listen on the address of the host name
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    timeout = timedelta(seconds=timeout_seconds)
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


def close_process_group() -> None:
    """Leave the process group, if this process has joined one, so that it may join another."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_divides(name: str, size: int, world_size: int) -> None:
    """Raise unless groups of `size` ranks cover all ranks."""
    if size < 1 or world_size % size:
        raise EngineError(f"{name}: {size} does not divide the {world_size} train ranks")
