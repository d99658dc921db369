"""Lets Megatron-Core 0.16.1 run on a machine without CUDA, on gloo: for tests.

Megatron-Core names CUDA in three ways: as the device of tensors and in `tensor.cuda()`, which a function mode for the
whole process redirects; in types such as "torch.cuda.FloatTensor", which the same mode reports; and in functions of
`torch.cuda`, which are replaced. `torch.cuda.is_available()` stays False.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _Stream:
    """A stream or an event. Work on the CPU is synchronous, so they have nothing to do."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> bool:
        return False


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Let Megatron-Core run on the CPU inside the context."""
    stream, cuda, tensor = _Stream(), torch.cuda, torch.Tensor

    def always(value: Any) -> Any:
        return lambda *args, **kwargs: value  # one function each: torch.compile keeps a table of them

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    nothing = ("manual_seed_all", "synchronize", "empty_cache", "set_device")
    sizes = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    replaced: dict[tuple[Any, str], Any] = {
        (cuda, "current_device"): lambda: CPU,
        (cuda, "device_count"): lambda: 1,
        (cuda, "get_rng_state"): get_state,
        (cuda, "set_rng_state"): set_state,
        (cuda, "manual_seed"): lambda seed: torch.default_generator.manual_seed(int(seed)) and None,
        (cuda, "Stream"): _Stream,
        (cuda, "Event"): _Stream,
        (cuda, "stream"): lambda stream: contextlib.nullcontext(),
        (cuda, "default_generators"): (torch.default_generator,),
        (tensor, "record_stream"): always(None),
        **{(cuda, name): always(stream) for name in ("current_stream", "default_stream")},
        **{(cuda, name): always(None) for name in nothing},
        **{(cuda, name): always(0) for name in sizes},
    }
    with contextlib.ExitStack() as stack:
        for (owner, name), value in replaced.items():
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(CudaIsCpu())
        import megatron.core.tensor_parallel.random as random
        from megatron.core.transformer.moe import moe_utils, token_dispatcher

        def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
            return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

        stack.enter_context(mock.patch.object(random, "_get_cuda_rng_state", get_state))
        stack.enter_context(mock.patch.object(random, "_set_cuda_rng_state", set_state))
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))  # a name it lacks
        stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", move_to_cpu))
        yield
