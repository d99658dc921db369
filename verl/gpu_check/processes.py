"""What passes between processes of this machine: collectives, and memory that one shares with another."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.child_process import end_with_parent
from verl.gpu_check.stage import Checks, Context
from verl.training.process_group import close_process_group, init_process_group
from verl.weights.bucket import SharedBucket, SharedBuffer, pack, unpack

ADDRESS = "127.0.0.1"
ELEMENTS = 1 << 20
TIMEOUT_S = 120.0
_FORK_FREE = multiprocessing.get_context("spawn")  # CUDA cannot be used in a forked process


def check_collectives(context: Context, checks: Checks) -> None:
    """Check the sums that ranks exchange: with gloo between two, and with NCCL between all accelerators."""
    _check_group(2, "cpu", checks, "gloo")
    if context.gpus > 1:
        _check_group(context.gpus, "cuda", checks, "NCCL")
    else:
        checks.notes.append("NCCL not checked: it needs 2 GPUs")


def _check_group(ranks: int, device: str, checks: Checks, name: str) -> None:
    with closing(socket.create_server((ADDRESS, 0))) as server:
        port = server.getsockname()[1]
    for rank, wrong in enumerate(_run_each(_run_rank, [(rank, ranks, port, device) for rank in range(ranks)])):
        checks.require(not wrong, f"{name}, rank {rank} of {ranks}: wrong results of {', '.join(wrong)}")
    checks.figures[f"{name} ranks"] = ranks


def _run_rank(rank: int, ranks: int, port: int, kind: str) -> list[str]:
    """Return the collectives whose result is wrong. Rank r contributes r + 1 everywhere, or its own elements."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    init_process_group(rank, ranks, ADDRESS, port, kind, TIMEOUT_S)
    try:
        own = torch.full((ELEMENTS,), rank + 1.0, device=device)
        total = own.clone()
        dist.all_reduce(total)
        gathered = own.new_empty(ranks * ELEMENTS)
        dist.all_gather_single(gathered, own)
        scattered = own.new_empty(ELEMENTS)
        dist.reduce_scatter_single(scattered, gathered)
        sent = own.clone()
        dist.broadcast(sent, ranks - 1)
        numbers = torch.arange(1.0, ranks + 1, device=device)
        results = {
            "all-reduce": (total, numbers.sum().expand(ELEMENTS)),
            "all-gather": (gathered, numbers.repeat_interleave(ELEMENTS)),
            "reduce-scatter": (scattered, numbers[rank].mul(ranks).expand(ELEMENTS)),
            "broadcast": (sent, numbers[-1].expand(ELEMENTS)),
        }
        return [name for name, (found, expected) in results.items() if not torch.equal(found, expected)]
    finally:
        close_process_group()


def check_sharing(context: Context, checks: Checks) -> None:
    """Check that a process reads what another has put into shared memory: a bucket of weights; on CUDA by IPC too."""
    weights = {"a": torch.arange(ELEMENTS, dtype=torch.int32), "b": torch.randn(1000, dtype=torch.float64)}
    buffers: list[SharedBuffer] = []

    def allocate(size: int) -> Any:
        buffers.append(SharedBuffer(size))
        return buffers[-1].data

    [bucket] = pack(weights.items(), max_bytes=8 * ELEMENTS, allocate=allocate)
    [buffer] = buffers
    with closing(buffer):
        shared = SharedBucket(bucket.slots, buffer.path, bucket.data.nbytes)
        found: dict[str, Tensor]
        [found] = _run_each(_read_bucket, [(shared,)])
    for name, tensor in weights.items():
        checks.require(torch.equal(found[name], tensor), f"another process reads other bytes of tensor {name!r}")
    checks.figures["MiB through /proc"] = bucket.data.nbytes / 2**20
    if context.device == "cuda":
        _check_cuda_ipc(checks)
    else:
        checks.notes.append("CUDA IPC not checked: it needs a GPU")


def _read_bucket(bucket: SharedBucket) -> dict[str, Tensor]:
    # Copies: tensors on shared memory of this process would end with it.
    return {name: each.clone() for name, each in unpack(bucket.slots, torch.from_numpy(bucket.data.copy()))}


def _check_cuda_ipc(checks: Checks) -> None:
    """Check memory of device 0 by its handle, as the weight transport `ipc` sends it. Never run on a GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    from verl.rollout.vllm.ipc_handles import encode_handles

    tensor = torch.arange(ELEMENTS, dtype=torch.int32, device="cuda").view(torch.uint8)
    _, arguments = reduce_tensor(tensor)
    [total] = _run_each(_sum_ipc, [(pickle.dumps(encode_handles({"device": arguments})),)])
    checks.require(
        total == tensor.sum(dtype=torch.int64).item(), "CUDA IPC: another process reads other bytes of the device"
    )
    checks.figures["MiB by CUDA IPC"] = tensor.nbytes / 2**20


def _sum_ipc(handles: bytes) -> int:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    from verl.rollout.vllm.ipc_handles import decode_handles

    torch.cuda.set_device(0)
    [arguments] = decode_handles(pickle.loads(handles)).values()
    return int(rebuild_cuda_tensor(*arguments).sum(dtype=torch.int64).item())


def _run_each(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call a function in one new process per call, all at once; return the results."""
    with ProcessPoolExecutor(len(calls), _FORK_FREE, initializer=end_with_parent) as processes:
        return [future.result() for future in [processes.submit(function, *arguments) for arguments in calls]]
