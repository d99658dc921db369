"""Whether the installed build of torch can use the NVIDIA accelerators of this machine, found without importing it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution

from verl.cluster.nvidia_smi import query_gpus
from verl.installation import format_cuda_hint

OLDEST_DRIVERS = {12: 525, 13: 580}
"""Major version of CUDA -> the first driver that runs it, by NVIDIA's release notes."""


def find_torch_problem() -> str:
    """Return why torch cannot use the accelerators of this machine, and the fix; empty if nothing is wrong."""
    try:
        torch = distribution("torch")
    except PackageNotFoundError:
        return ""
    build = torch.read_text("../torch/version.py") or ""
    if not build or re.search(r"^hip\b.*= '", build, re.MULTILINE):  # an unusual installation, or AMD's build
        return ""
    found = re.search(r"^cuda\b.*= '(\d+)\.(\d+)'", build, re.MULTILINE)
    cuda = None if found is None else (int(found[1]), int(found[2]))
    return describe_problem(torch.version, cuda, query_gpus("driver_version"))


def describe_problem(version: str, cuda: tuple[int, int] | None, drivers: Sequence[str]) -> str:
    """Return why a torch, built for `cuda` or for none, does not run with these drivers; empty if it does.

    >>> describe_problem("2.13.0", (13, 0), ["580.65.06"])
    ''
    """
    if cuda is None:
        return f"torch: {version} is a build without CUDA; run {format_cuda_hint()}"
    needed = OLDEST_DRIVERS.get(cuda[0], 0)
    for driver in drivers:
        major = driver.partition(".")[0]
        if major.isdigit() and int(major) < needed:
            return (
                f"driver: {driver} is too old for torch {version}, which is built for CUDA {cuda[0]}.{cuda[1]} and "
                f"needs {needed} or later; install a newer driver, or builds of torch and vLLM for an older CUDA "
                "(docs/gpu.md)"
            )
    return ""
