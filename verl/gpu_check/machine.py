"""Versions, driver, and whether every device computes."""

from __future__ import annotations

from verl.cluster.cuda_build import find_torch_problem
from verl.config.checks.device_support import MIN_CAPABILITY
from verl.gpu_check.stage import Checks, Context
from verl.preflight.finding import Severity
from verl.preflight.machine import describe_machine, find_space_findings, find_version_findings

SIZE = 512
LIMITS = {"float32": 1e-4, "bfloat16": 1e-2}  # with TF32, which is off by default, float32 would exceed its limit


def check_versions(context: Context, checks: Checks) -> None:
    """Check the installed packages, the build of torch against the driver, and a product of matrices on each device."""
    wrong = [finding for finding in find_version_findings() if finding.severity == Severity.ERROR]
    checks.require(not wrong, "; ".join(f"{each.place}: {each.problem}; {each.fix}" for each in wrong))
    if context.device == "cuda":
        problem = find_torch_problem()
        checks.require(not problem, problem)
    checks.notes += [
        describe_machine(context.gpus),
        *(f"{each.place}: {each.problem}" for each in find_space_findings()),
    ]
    _check_devices(context, checks)


def _check_devices(context: Context, checks: Checks) -> None:
    import torch

    devices = [torch.device("cpu")]
    if context.device == "cuda":
        count = torch.cuda.device_count()
        checks.require(count == context.gpus, f"torch finds {count} of {context.gpus} GPUs (CUDA_VISIBLE_DEVICES)")
        devices = [torch.device("cuda", index) for index in range(count)]
        for device in devices:
            found = torch.cuda.get_device_capability(device)
            name = f"{torch.cuda.get_device_name(device)}: compute capability {found[0]}.{found[1]}"
            checks.require(found >= MIN_CAPABILITY, f"{name} is too old: {MIN_CAPABILITY[0]}.0 is needed")
    left, right = torch.randn(2, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = left.numpy() @ right.numpy()  # by numpy, without torch
    for dtype, limit in LIMITS.items():
        worst = 0.0
        for device in devices:
            parts = (each.to(device, getattr(torch, dtype)) for each in (left, right))
            product = torch.mm(*parts).double().cpu().numpy()
            worst = max(worst, float(abs(product - exact).max() / abs(exact).max()))
        checks.at_most(f"matmul {dtype}", worst, limit, f"a product of matrices in {dtype} is wrong")
