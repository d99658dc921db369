"""`verl gpu-check` on the CPU: every stage that the CPU has passes, and what is broken on purpose is found and named.

Stages that need a GPU are skipped, each with its reason. Then, one at a time: matrices of a layer arrive with their
rows moved, the bucket of a layer is lost, an engine does not sleep, the loss has no gradient, the driver is too old
for a torch with CUDA (a program in place of nvidia-smi names it), and the probe accepts everything. The stage named for
each has to fail, and to say what is wrong. `--short` (CI): fewer stages, and a run of few steps in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import finish, skip

from verl.gpu_check.stages import STAGES
from verl.rollout.vllm.checks import find_problem

SITE = Path(__file__).parents[1] / "faults" / "_crash_site"
NEED_GPUS = ("train-ipc", "train-nccl", "train-offload", "train-fp8")
SHORT = ("versions", "collectives", "sharing", "attention", "logprobs", "engine", "train-ipc")
DRIVER = "535.104.05"
TIMEOUT_S = 1200
AT_ONCE = 2  # while one waits for its engine, the other works


@dataclass(frozen=True)
class Sabotage:
    """What is replaced, by what in `gpu_sabotages`, and where and how it has to be named."""

    name: str
    method: str
    function: str
    stage: str
    said: str
    options: tuple[str, ...] = ()
    driver: str = ""


ENGINE, OTHER = "verl.rollout.vllm.engine:VllmEngine", "verl.rollout.hf:HfEngine"
HF = ("--engine", "hf")  # starts faster than vLLM
SABOTAGES = (
    Sabotage("wrong weights", f"{OTHER}.load_bucket", "corrupt_weights", "engine", "wrong weights: ", HF),
    Sabotage("lost bucket", f"{ENGINE}.load_bucket", "lose_bucket", "engine", "a bucket was lost: "),
    Sabotage("broken sleep", f"{ENGINE}.sleep", "stay_awake", "engine", "broken sleep: "),
    Sabotage(
        "no gradient",
        "verl.algorithms.objective:PolicyObjective.__call__",
        "remove_gradient",
        "train-host",
        "no gradient: ",
        (*HF, "--steps", "4"),
    ),
    Sabotage(
        "old driver",
        "verl.cluster.cuda_build:find_torch_problem",
        "name_cuda_build",
        "versions",
        f"driver: {DRIVER} is too old",
        driver=DRIVER,
    ),
    Sabotage("blind probe", "verl.weights.probe:compare_logprobs", "believe_all", "engine", "blind probe: ", HF),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    if problem := find_problem():
        skip("gpu_check", f"vLLM: {problem}")
    with tempfile.TemporaryDirectory(prefix="verl-show-gpu-check-") as directory:
        folder = Path(directory)
        healthy = check(folder, [] if not options.short else ["--stages", ",".join(SHORT)])
        states = {stage["stage"]: stage["state"] for stage in healthy["stages"]}
        expected = {
            name: "skipped" if name in NEED_GPUS else "ok" for name in (SHORT if options.short else list(STAGES))
        }
        with ThreadPoolExecutor(AT_ONCE) as threads:
            found = threads.map(lambda sabotage: is_named(sabotage, folder / sabotage.name), SABOTAGES)
            named = dict(zip((sabotage.name for sabotage in SABOTAGES), found, strict=True))
    finish(
        "gpu_check",
        states == expected and all(named.values()),
        stages=states,
        checks=sum(stage["checks"] for stage in healthy["stages"]),
        seconds={stage["stage"]: round(stage["seconds"]) for stage in healthy["stages"]},
        sabotages_named=named,
    )


def is_named(sabotage: Sabotage, folder: Path) -> bool:
    """Return whether the stage fails and says what is broken. `folder` is made."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        "VERL_SHOW_REPLACE": f"{sabotage.method} gpu_sabotages:{sabotage.function}",
        "PYTHONPATH": os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")]),
    }
    if sabotage.driver:
        environment["PATH"] = f"{make_nvidia_smi(folder, sabotage.driver)}{os.pathsep}{os.environ['PATH']}"
    report = check(folder, ["--stages", sabotage.stage, *sabotage.options], environment)
    [stage] = report["stages"]
    return stage["state"] == "failed" and stage["text"].removeprefix("after sleep: ").startswith(sabotage.said)


def make_nvidia_smi(folder: Path, driver: str) -> Path:
    """Write a program that names one GPU and its driver; return its folder."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\ncase "$1" in *=driver_version) echo {driver};; *=index) echo 0;; esac\n')
    program.chmod(0o755)
    return program.parent


def check(folder: Path, options: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run `verl gpu-check`, show what it prints, and return its report."""
    report, start = folder / "report.json", time.monotonic()
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "verl", "gpu-check", "--report", str(report), *options]
    done = subprocess.run(command, env=os.environ | (environment or {}), cwd=folder, timeout=TIMEOUT_S)
    found: dict[str, Any] = json.loads(report.read_text())
    print(f"exit code {done.returncode} after {time.monotonic() - start:.0f} s", flush=True)
    if (done.returncode == 0) != found["passed"]:
        raise SystemExit(f"exit code {done.returncode}, but the report says passed={found['passed']}")
    for stage in found["stages"]:
        if stage["state"] == "failed":
            print("\n".join(stage["output"][-15:]), flush=True)
    return found


if __name__ == "__main__":
    main()
