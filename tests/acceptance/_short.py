"""Run the short form of the acceptance scripts, three at a time, and print the seconds that each took.

python tests/acceptance/_short.py [--rotation all] [NAME ...]

Most scripts run at every commit. Those in `ROTATION` take minutes, because they start engines several times, measure
speed, or repeat many cases: one group of them runs, chosen by the number of commits. `--rotation all` runs all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

from _run import environment, scripts  # noqa: E402
from rotation import current_group, record_left  # noqa: E402

ROTATION = (
    (
        "kills",
        "families",
        "sleep",
        "step",
        "trl",
        "vocabulary",
        "unearned",
        "first_contact",
        "async_simulation",
        "replay",
        "resume",
        "cluster",
    ),
    (
        "lora",
        "api",
        "save_cost",
        "offload",
        "placement",
        "gateway",
        "grading",
        "slurm",
        "inflight",
        "report",
        "crash",
        "probe",
    ),
    (
        "optimizers",
        "algorithms",
        "routing",
        "budget",
        "drift",
        "data",
        "merge",
        "async_throughput",
        "elastic",
        "audit",
        "sglang",
        "gpu_check",
    ),
    (
        "distillation",
        "reward_overlap",
        "poison",
        "reshard",
        "load",
        "megatron",
        "tools",
        "sandbox",
        "combinations",
        "async_learning",
        "mistakes",
        "overhead",
        "cuda",
    ),
    (
        "trust",
        "stall",
        "real_model",
        "tp",
        "sync",
        "bandits",
        "episodes",
        "hostile_agents",
        "deterministic",
        "live",
        "diagnosis",
        "first_minutes",
    ),
    (
        "dapo",
        "start",
        "dataplane",
        "hostile_rewards",
        "prefix",
        "parallel",
        "game",
        "scale",
        "async_resume",
        "monitoring",
        "parity",
    ),
)
LONG = ("learning",)  # runs at every commit, and starts first, as do those of the rotation
AT_ONCE = 3  # most of the time they wait: for engines to start, for timeouts, for each other


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    seconds: float
    passed: bool
    output: str

    @property
    def is_skipped(self) -> bool:
        """Whether the script said that it cannot run on this machine."""
        return not self.passed and isinstance(read_figures(self).get("skipped"), str)

    @property
    def figures(self) -> str:
        """The JSON line at the end, or what there is instead. Python may warn of semaphores after it."""
        lines = self.output.strip().splitlines()
        figures = [line for line in lines if line.startswith('{"name": ')]
        return (figures or lines or ["no output"])[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rotation", choices=["due", "all"], default="due", help="all: every script")
    parser.add_argument("names", nargs="*", help="these alone")
    options = parser.parse_args()
    names = options.names or choose(list(scripts()), None if options.rotation == "all" else current_group())
    start = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as workers:
        results = []
        for result in workers.map(run, names):
            results.append(result)
            print(result.figures if result.passed else result.output, flush=True)
    print(f"\n{'script':<18}{'seconds':>8}")
    for result in sorted(results, key=lambda result: -result.seconds):
        verdict = "" if result.passed else "  SKIPPED" if result.is_skipped else "  FAILED"
        print(f"{result.name:<18}{result.seconds:>8.0f}{verdict}")
    record_left(f"show-{name.replace('_', '-')}" for name in set(scripts()) - set(names))
    skipped = [result for result in results if result.is_skipped]
    failed = [result for result in results if not (result.passed or result.is_skipped)]
    passed = len(results) - len(failed) - len(skipped)
    print(f"{passed} passed, {len(skipped)} skipped, {len(failed)} failed, {time.monotonic() - start:.0f} s in all")
    for result in failed:  # again at the end: logs of CI are often cut
        print(f"FAILED {result.name}: {result.figures[-2000:]}")
    sys.exit(bool(failed))


def choose(names: list[str], group: int | None) -> list[str]:
    """Return those that run with a group of the rotation, or with all groups (None); long ones first."""
    rotating = {name for members in ROTATION for name in members}
    if unknown := (rotating | set(LONG)) - set(names):
        raise SystemExit(f"no such acceptance script: {', '.join(sorted(unknown))}")
    chosen = rotating if group is None else set(ROTATION[group])
    first = [name for name in names if name in chosen or name in LONG]
    return first + [name for name in names if name not in rotating and name not in LONG]


def run(name: str) -> Result:
    start = time.monotonic()
    command = [sys.executable, str(scripts()[name]), "--short"]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    result = Result(name, time.monotonic() - start, done.returncode == 0, done.stdout)
    return result if is_a_pass(result) else Result(name, result.seconds, False, result.output)


def is_a_pass(result: Result) -> bool:
    """A script that ends with code 0 has also to say that it passed, in JSON and under its own name."""
    figures = read_figures(result)
    return result.passed and figures.get("pass") is True and figures.get("name", "").startswith(result.name)


def read_figures(result: Result) -> dict[str, Any]:
    try:
        return json.loads(result.figures)
    except ValueError:
        return {}


if __name__ == "__main__":
    main()
