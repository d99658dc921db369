"""Joining the ranks of one engine: the only place that chooses a collective backend."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from verl.errors import EngineError

__all__ = ["close_process_group", "init_process_group"]

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By type of device. Numbers that live on the host (totals, metrics) always travel by gloo."""


def init_process_group(
    rank: int,
    world_size: int,
    address: str,
    port: int,
    device: str = "cpu",
    timeout_seconds: float = 600.0,
    listener: socket.socket | None = None,
) -> None:
    """Join `world_size` processes that all name the same address and port; returns when every one is there.

    Rank 0 listens there, by `listener` if it has one already, and on no other address of its machine; with 127.0.0.1
    no rank listens on any other. A rank that is alone may name port 0, which is any.
    """
    kind = torch.device(device).type
    if kind not in BACKENDS:
        raise EngineError(f"device {device!r}: no collective backend is known for it; use one of {', '.join(BACKENDS)}")
    if address == "127.0.0.1":  # gloo and NCCL would listen on the address of the host's name
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    timeout = timedelta(seconds=timeout_seconds)
    try:
        # Without a socket of its own the store would listen on all addresses.
        door = (listener or socket.create_server((address, port), backlog=world_size)).detach() if rank == 0 else None
        store = dist.TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=door)
        dist.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (dist.DistError, OSError) as error:
        raise EngineError(
            f"rank {rank} of {world_size} could not join {address}:{port} within {timeout_seconds:g} s: {error}; "
            "see that every rank started and can reach that address"
        ) from error


def close_process_group() -> None:
    """Leave the group again, if this process has joined one, so that it may join another."""
    if dist.is_initialized():
        dist.destroy_process_group()
