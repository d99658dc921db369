"""Memory and time of a run by the estimates of `verl plan`, on the accelerators of this machine or on named ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.schema import Config
from verl.errors import ConfigError
from verl.memory_plan.accelerators import GIB, Device, assume_device
from verl.memory_plan.run_plan import get_cluster, get_workload, plan_memory
from verl.memory_plan.step_time import estimate_step
from verl.memory_plan.suggestions import format_changes, suggest_settings
from verl.preflight.finding import Finding, Severity
from verl.trainer.build.preflight import read_device_memory

PLACE = "memory"


@dataclass(slots=True)
class MemoryCheck:
    """What does not fit, and the estimates in one line."""

    findings: list[Finding]
    summary: str


def check_memory(config: Config, device: Device | None) -> MemoryCheck | None:
    """Estimate a run on `device`, or on the accelerators of this machine; None if there are none."""
    memory = read_device_memory() if device is None else device.memory
    if memory is None:
        return None
    return MemoryCheck(list(_find_problems(config, device or assume_device(memory))), _describe(config, memory, device))


def _find_problems(config: Config, device: Device) -> Iterator[Finding]:
    from verl.trainer.build.worker_settings import train_settings  # imports Ray

    try:
        problems = plan_memory(config, train_settings).problems(device.memory)
    except ConfigError as error:
        yield from (Finding.from_message(problem, Severity.NOTE) for problem in error.problems)
        return
    changes = suggest_settings(config, device, train_settings) if problems else []
    fix = (
        "set " + " ".join(format_changes(changes)) if changes else "use more devices, or shorter sequences (verl plan)"
    )
    for phase, problem in problems.items():
        yield Finding(Severity.WARNING, f"{PLACE}, {phase}", f"by estimate, it does not fit: {problem}", fix)


def _describe(config: Config, memory: int, device: Device | None) -> str:
    from verl.trainer.build.worker_settings import train_settings

    try:
        plan = plan_memory(config, train_settings)
    except ConfigError:
        return "not estimated"
    phase, usage = max(plan.phases(memory).items(), key=lambda item: item[1].total)
    text = f"at most {usage.total / GIB:.0f} of {memory / GIB:.0f} GiB ({phase})"
    if device is not None:
        seconds = estimate_step(plan, get_cluster(config, device), get_workload(config))
        text += f", {seconds:,.0f} s per step on {device.name}"
    return text + ", by estimate"
