"""Joining the ranks of one engine: the only place that chooses a collective backend."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from verl.errors import EngineError

__all__ = ["close_process_group", "init_process_group"]

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By type of device. Numbers that live on the host (totals, metrics) always travel by gloo."""


def init_process_group(
    rank: int, world_size: int, address: str, port: int, device: str = "cpu", timeout_seconds: float = 600.0
) -> None:
    """Join `world_size` processes that all name the same address and port; returns when every one is there."""
    kind = torch.device(device).type
    if kind not in BACKENDS:
        raise EngineError(f"device {device!r}: no collective backend is known for it; use one of {', '.join(BACKENDS)}")
    try:
        dist.init_process_group(
            BACKENDS[kind],
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except dist.DistError as error:
        raise EngineError(
            f"rank {rank} of {world_size} could not join {address}:{port} within {timeout_seconds:g} s: {error}; "
            "see that every rank started and can reach that address"
        ) from error


def close_process_group() -> None:
    """Leave the group again, so that this process may join another."""
    dist.destroy_process_group()
