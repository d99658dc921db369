"""The first minutes of a new user: from an empty environment to the report of the demo, and the demo with 10 seeds.

make show-first-minutes [ARGS="[--short] [--only uv|pip] [--seeds N]"]

The documented command installs verl into an empty environment, which is measured and reported apart. Then, in a
terminal of 120 columns: `verl demo`, and the commands that it prints at its end, which look at the run and use the
model. Together they take at most 5 minutes of the cores of this machine. With each seed the reward of the demo rises:
the mean of the last quarter of the steps over that of the first one. `--short` (CI) uses the present environment, one
seed and fewer steps, without the bound on time.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
from _common import Stopwatch, finish, metrics_of
from _terminal import Session, record
from install import TORCH_INDEX, clean_environment, copy_checkout, find_uv, is_reachable, make_index, read_commands

ALLOWED_S = 300.0
SEEDS, STEPS, SHORT_STEPS = 10, 40, 12
MIN_RISE = 0.05
"""Three standard errors or more: a step has 512 responses, and a quarter of the short form three steps."""
PRINTED = {"verl report", "verl show", "verl generate", "verl eval"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", choices=("uv", "pip"), default="uv", help="the program that installs")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    steps, seeds = (SHORT_STEPS, 1) if options.short else (STEPS, options.seeds)
    with tempfile.TemporaryDirectory(prefix="verl-first-") as directory:
        folder = Path(directory)
        programs, installation = Path(sys.executable).parent, {}
        if not options.short:
            programs, installation = install(folder, options.only)
        os.environ.pop("PYTHONPATH", None)  # that of this script
        os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
        stages = Stages(folder)
        stages.play(steps)
        rises = [measure_rise(folder / "demo/run", steps)]
        for seed in range(1, seeds):
            stages.run(f"verl demo --dir demo-{seed} --steps {steps} trainer.seed={seed}", is_timed=False)
            rises.append(measure_rise(folder / f"demo-{seed}/run", steps))
            print(f"seed {seed}: the reward rises by {rises[-1]:.3f}", flush=True)
    seconds = sum(stages.seconds.values())
    finish(
        "first_minutes",
        not stages.faults and min(rises) >= MIN_RISE and (options.short or seconds <= ALLOWED_S),
        steps=steps,
        installation=installation,
        seconds=round(seconds, 1),
        allowed=None if options.short else ALLOWED_S,
        stages={name: round(value, 1) for name, value in stages.seconds.items()},
        seconds_to_first_output=stages.first_outputs,
        seeds=seeds,
        seeds_with_rising_reward=sum(rise >= MIN_RISE for rise in rises),
        rises=[round(rise, 3) for rise in rises],
        faults=stages.faults,
    )


def install(folder: Path, program: str) -> tuple[Path, dict[str, Any]]:
    """Install a copy of the checkout as documented; return the folder of its programs, and what it took."""
    index = TORCH_INDEX if is_reachable(TORCH_INDEX) else make_index(folder / "index")
    checkout, command = copy_checkout(folder / "checkout", index), read_commands()[program]
    watch, venv = Stopwatch(), folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    path = os.pathsep.join([str(venv / "bin"), str(Path(find_uv()).parent), os.environ["PATH"]])
    environment = clean_environment(VIRTUAL_ENV=str(venv), PATH=path)
    print(f"$ {command}", flush=True)
    subprocess.run(shlex.split(command), cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
    is_real = index == TORCH_INDEX
    figures = {"program": program, "seconds": round(watch.seconds()), "index": index if is_real else "stand-in"}
    return venv / "bin", figures


class Stages:
    """Commands in a terminal, the seconds of the cores that each took, and what was wrong."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.seconds: dict[str, float] = {}
        self.first_outputs: dict[str, float] = {}
        self.faults: list[str] = []

    def play(self, steps: int) -> None:
        """From the demo to its report, and to the responses of its model."""
        demo = self.run("verl demo" if steps == STEPS else f"verl demo --steps {steps}")
        commands = [line.strip() for line in demo.text.splitlines() if line.startswith("  verl ")]
        if missing := PRINTED - {" ".join(command.split()[:2]) for command in commands}:
            self.faults.append(f"verl demo does not print: {', '.join(sorted(missing))}")
        texts = {command.split()[1]: self.run(command).text for command in commands}
        if "score" not in texts.get("show", ""):
            self.faults.append("verl show prints no scores")
        self._check()

    def run(self, command: str, *, is_timed: bool = True) -> Session:
        watch = Stopwatch()
        name = "_".join(shlex.split(command)[:2])
        session = record(shlex.split(command), self._folder, log=self._folder / f"{name}.txt", timeout_s=3600.0)
        print(f"{session.seconds:6.1f} s  {command}", flush=True)
        if session.code:
            self.faults.append(f"{command}: exit code {session.code}")
            print(session.text, flush=True)
        if is_timed:
            label = " ".join(command.split()[:2])
            self.seconds[label] = session.seconds * (1 - watch.stolen())
            self.first_outputs[label] = round(session.first_output_s, 1)
        return session

    def _check(self) -> None:
        """Note what the files of the stages lack."""
        report = self._folder / "demo/run/report.html"
        page = report.read_text() if report.exists() else ""
        if "<html" not in page or re.search(r"""(?:src|href)=["']https?://""", page):
            self.faults.append("the report is not one HTML file without a network")
        responses = self._folder / "responses.parquet"
        problems = pq.read_table(self._folder / "demo/test.parquet").num_rows
        if not responses.exists() or pq.read_table(responses).num_rows != problems:
            self.faults.append("responses.parquet does not have all problems")


def measure_rise(run: Path, steps: int) -> float:
    """Return the mean reward of the last quarter of the steps minus that of the first one; 0 if steps are missing."""
    if not (run / "metrics.jsonl").exists():
        return 0.0
    rewards = {line["step"]: line["reward/mean"] for line in metrics_of(run) if "reward/mean" in line}
    if sorted(rewards) != list(range(1, steps + 1)):
        return 0.0
    values, part = [rewards[step] for step in sorted(rewards)], steps // 4
    return fmean(values[-part:]) - fmean(values[:part])


if __name__ == "__main__":
    main()
