"""All stages, in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name

from verl.gpu_check.stage import Checks, Context


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: the function that does it, as `module:name` in this package, and what it checks."""

    function: str
    summary: str

    def load(self) -> Callable[[Context, Checks], None]:
        """Import the function."""
        function: Callable[[Context, Checks], None] = resolve_name(f"verl.gpu_check.{self.function}")
        return function


STAGES = {
    "versions": Stage("machine:check_versions", "packages, driver, and a product of matrices on each device"),
    "collectives": Stage("processes:check_collectives", "gloo, and NCCL between all GPUs"),
    "sharing": Stage("processes:check_sharing", "memory of one process read by another; CUDA IPC"),
    "attention": Stage("kernels:check_attention", "packed against plain attention, forward and backward"),
    "logprobs": Stage("kernels:check_logprobs", "compiled against plain log-probs, forward and backward"),
    "layers": Stage("kernels:check_layers", "compiled against plain layers, forward and backward"),
    "engine": Stage("engine:check_engine", "an engine sleeps, wakes, gets new weights; wrong ones are found"),
    "train-host": Stage("runs:check_host", "GRPO learns, saves and resumes; weights through host memory"),
    "train-ipc": Stage("runs:check_ipc", "the same with weights by CUDA IPC"),
    "train-nccl": Stage("runs:check_nccl", "the same with weights by NCCL, engines on other GPUs"),
    "train-tp2": Stage("runs:check_tensor_parallel", "a few steps with engines of 2 devices"),
    "train-offload": Stage("runs:check_offload", "a few steps with weights and optimizer in host memory"),
    "train-lora": Stage("runs:check_lora", "a few steps of an adapter"),
    "train-fp8": Stage("runs:check_fp8", "a few steps with engines in FP8"),
}
FIRST = "versions"
"""The stage without which no other one can be right."""
