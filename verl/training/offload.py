"""What leaves the device while nobody uses it: storages are emptied into host memory and filled again.

The tensors stay the objects that they are, and only what they point to comes and goes, as FSDP does it with gathered
weights. So neither FSDP nor the optimiser notices, and all devices are alike; on a CPU nothing is gained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["Offloader", "copy_to_host", "iter_moments"]


class Offloader:
    """Keeps tensors in host memory except inside `on_device()`, or between `load()` and `offload()`, if `active`.

    `tensors()` is called at every offload, because an optimizer creates its state late. Host memory is reused.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, active: bool) -> None:
        self.active = active
        self._tensors = tensors
        self._users = 0
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []  # emptied storages, and what was in them
        self._host: dict[int, Tensor] = {}

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Within this the tensors can be used."""
        self.load()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self.offload()

    def load(self) -> None:
        """Bring back what is away."""
        for storage, host in self._away:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)
        self._away = []

    def offload(self) -> None:
        """Empty the storages, unless `on_device()` is active. FSDP must have released its gathered weights."""
        if not self.active or self._users or self._away:
            return
        storages = {each._cdata: each for each in map(_storage_of, self._tensors()) if each.nbytes()}
        self._host = {key: self._host_copy(key, storage) for key, storage in storages.items()}
        if any(host.is_pinned() for host in self._host.values()):
            torch.accelerator.synchronize()  # the copies are under way
        for key, storage in storages.items():
            storage.resize_(0)
            self._away.append((storage, self._host[key]))

    def _host_copy(self, key: int, storage: torch.UntypedStorage) -> Tensor:
        host = self._host.get(key)
        if host is None or host.numel() != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
        return host.copy_(_bytes_of(storage), non_blocking=True)


def iter_moments(optimizer: torch.optim.Optimizer | None) -> Iterator[Tensor]:
    """The large tensors of an optimiser's state; counts of steps stay where they are."""
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (each for each in state.values() if isinstance(each, Tensor) and each.ndim > 0)


def copy_to_host(state: Any) -> Any:
    """Nested dictionaries with a copy of every tensor in them that stays when the original is parked."""
    if isinstance(state, dict):
        return {name: copy_to_host(part) for name, part in state.items()}
    return state.detach().to("cpu", copy=True) if isinstance(state, Tensor) else state


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
