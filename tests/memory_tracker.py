"""Counts the bytes of live tensors, real or fake, after every torch operation."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READ_NUMBER = torch.ops.aten._local_scalar_dense.default


class MemoryTracker(TorchDispatchMode):
    """The bytes of live tensors: `live` now, and `peak` since it was last reset.

    A storage is counted once, with its current size: FSDP empties and refills storages instead of freeing them. Memory
    that a kernel uses internally, and what an allocator wastes, are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were created before."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if self._counts(local):
                self._see(local.untyped_storage())

    def reset_peak(self) -> int:
        """Return the peak, and start the next one from what is live."""
        peak, self.peak = self.peak, self.live
        return peak

    def sizes(self) -> Counter[int]:
        """Return how many live storages have each size in bytes."""
        return Counter(self._sizes.values())

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations on local tensors come back here
        output = self._run(func, args, kwargs or {})
        self.add(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        return output

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _counts(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, FakeTensor)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
        self._set(key, size)

    def _set(self, key: int, size: int) -> None:
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside the context.

        `UntypedStorage.resize_` is replaced, because no torch operation shows that FSDP resizes a storage (torch 2.13).
        """
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[assignment,method-assign]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


class FakeMemoryTracker(MemoryTracker):
    """A tracker under which floating-point tensors are fake: they have a size and no memory.

    Tokens, masks and offsets are small and stay real, so that shapes that depend on them are known. A number that is
    read from a fake tensor is 1.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if detect_fake_mode() is not None:  # DTensor computes the shape of a result on fake tensors of its own
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is _READ_NUMBER and self._counts(tensors[0]):
            return 1.0
        if any(map(self._counts, tensors)) or (not tensors and _creates_floats(func, args, kwargs)):
            with self._mode:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _counts(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode


def _creates_floats(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether a function that creates a tensor makes one of floating-point numbers, not on the meta device."""
    dtype = options.get("dtype")
    if dtype is None:
        is_range = func.overloadpacket is torch.ops.aten.arange and all(isinstance(arg, int) for arg in args)
        dtype = torch.int64 if is_range else torch.get_default_dtype()
    return dtype.is_floating_point and torch.device(options.get("device") or "cpu").type != "meta"
