"""What `verl gpu-check` has found on this machine, in a file of the user: later runs use what has passed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from verl.cluster.nvidia_smi import query_gpus
from verl.config.rollout_engines import DEFAULT_ENGINE
from verl.private_files import get_user_folder

FILE = "gpu-check-record.json"
_PACKAGES = ("verl", "torch", DEFAULT_ENGINE)


@dataclass(frozen=True, slots=True)
class GpuRecord:
    """The stages that have passed on a machine as it is now; if there are none, `problem` says why."""

    passed: frozenset[str] = frozenset()
    problem: str = ""


def describe_setup() -> dict[str, str]:
    """Return what the result of a check depends on: with another GPU, driver or version it says nothing."""
    setup = {
        "GPU": " and ".join(sorted(set(query_gpus("name")))),
        "driver": " and ".join(sorted(set(query_gpus("driver_version")))),
    }
    for package in _PACKAGES:
        try:
            setup[package] = version(package)
        except PackageNotFoundError:
            setup[package] = "not installed"
    return setup


def record_stage(name: str, *, has_passed: bool) -> None:
    """Add a stage of `verl gpu-check` to those that have passed on this machine, or remove it from them."""
    setup, recorded = describe_setup(), _read()
    before = recorded["passed"] if recorded.get("setup") == setup else []
    passed = {*before, name} if has_passed else {*before} - {name}
    path = get_user_folder() / FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"setup": setup, "passed": sorted(passed)}) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_record() -> GpuRecord:
    """Return what has passed on this machine."""
    recorded, setup = _read(), describe_setup()
    if not recorded:
        return GpuRecord(problem="`verl gpu-check` has not run")
    before = recorded["setup"]
    if changed := [f"{name} {before.get(name)} (now {now})" for name, now in setup.items() if before.get(name) != now]:
        return GpuRecord(problem=f"`verl gpu-check` ran with {', '.join(changed)}")
    return GpuRecord(frozenset(recorded["passed"]))


def _read() -> dict[str, Any]:
    """Return the record; empty if there is none, or it cannot be read."""
    try:
        recorded = json.loads((get_user_folder() / FILE).read_text(encoding="utf-8"))
        return {"setup": dict(recorded["setup"]), "passed": list(recorded["passed"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
