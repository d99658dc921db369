"""Pretends that this machine has 8 H100s, for code that configures and imports: torch's queries and vLLM's platform.

Needs a libcuda.so.1 without functions on LD_LIBRARY_PATH (`show-cuda` builds it). Nothing can be computed.
"""

from __future__ import annotations

import os
import types

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

GIB = 1 << 30
COUNT, CAPABILITY = 8, (9, 0)
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=int(79.6 * GIB),
    multi_processor_count=132,
    uuid="GPU-pretended",
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


def pretend() -> None:
    """Replace the queries, and choose vLLM's CUDA platform."""
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda._lazy_init = lambda: None
    cuda.device_count = lambda: COUNT
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None
    cuda.get_device_capability = lambda device=None: CAPABILITY
    cuda.get_device_properties = lambda device=None: PROPERTIES
    cuda.get_device_name = lambda device=None: PROPERTIES.name
    cuda.mem_get_info = lambda device=None: (PROPERTIES.total_memory - GIB // 2, PROPERTIES.total_memory)
    torch._C._cuda_getDeviceCount = lambda: COUNT
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    vllm.platforms._current_platform = NonNvmlCudaPlatform()
