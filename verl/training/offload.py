"""Offloading of unused tensors: their storages are copied to host memory, emptied, and filled again.

The tensor objects stay the same and only their storage is resized, as FSDP does with gathered weights. So neither FSDP
nor the optimizer notices, and all device types are handled alike; on a CPU nothing is gained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Offloader:
    """Keeps tensors in host memory except inside `on_device()`, or between `load()` and `offload()`, if `active`.

    `tensors()` is called at every offload, because an optimizer creates its state late. Host memory is reused.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, active: bool) -> None:
        self.active = active
        self._tensors = tensors
        self._users = 0
        self._offloaded: list[tuple[torch.UntypedStorage, Tensor]] = []  # emptied storages, and their content
        self._host: dict[int, Tensor] = {}

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the tensors usable inside the context."""
        self.load()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self.offload()

    def load(self) -> None:
        """Copy offloaded tensors back to the device."""
        for storage, host in self._offloaded:
            storage.resize_(host.numel())
            _as_bytes(storage).copy_(host, non_blocking=True)
        self._offloaded = []

    def offload(self) -> None:
        """Empty the storages, unless `on_device()` is active. FSDP must have released its gathered weights."""
        if not self.active or self._users or self._offloaded:
            return
        storages = {storage._cdata: storage for storage in map(_storage, self._tensors()) if storage.nbytes()}
        self._host = {key: self._copy_to_host(key, storage) for key, storage in storages.items()}
        if any(host.is_pinned() for host in self._host.values()):
            torch.accelerator.synchronize()  # wait for the copies
        for key, storage in storages.items():
            storage.resize_(0)
            self._offloaded.append((storage, self._host[key]))

    def copy_to_host(self, state: Any) -> Any:
        """Copy every tensor in nested dictionaries to host memory; offloaded ones pass the device one by one."""
        if isinstance(state, dict):
            return {name: self.copy_to_host(part) for name, part in state.items()}
        if not isinstance(state, Tensor):
            return state
        storage = _storage(state) if self._offloaded else None
        host = None if storage is None or storage.nbytes() else self._host.get(storage._cdata)
        if storage is None or host is None:
            return state.detach().to("cpu", copy=True)
        storage.resize_(host.numel())
        try:
            _as_bytes(storage).copy_(host)
            return state.detach().to("cpu", copy=True)
        finally:
            storage.resize_(0)

    def _copy_to_host(self, key: int, storage: torch.UntypedStorage) -> Tensor:
        host = self._host.get(key)
        if host is None or host.numel() != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
        return host.copy_(_as_bytes(storage), non_blocking=True)


@contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Let torch compute with `count` threads on the CPU inside the context; None: as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def iter_moments(optimizer: torch.optim.Optimizer | None) -> Iterator[Tensor]:
    """Yield the large tensors of an optimizer's state, but not its step counts."""
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim > 0)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
