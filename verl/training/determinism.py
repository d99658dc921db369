"""torch's deterministic mode, for trainer.deterministic on accelerators. Never run on a GPU."""

from __future__ import annotations

import os

import torch

from verl.config.checks.device_support import check_capability


def enable_determinism() -> None:
    """Use deterministic kernels only, in this process. torch raises for an operation that has none.

    Call it before the first operation on a GPU: cuBLAS reads the variable once.
    """
    if torch.cuda.is_available():
        check_capability(torch.cuda.get_device_capability())
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # also in compiled functions


def disable_determinism() -> None:
    """Disable deterministic mode, in a process that continues with other work."""
    torch.use_deterministic_algorithms(False)
