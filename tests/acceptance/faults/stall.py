"""Hangs are reported within 30 s of their timeout, with process, action, time and stack, with real engines.

Runs of `verl train`, in which, after a step, something is made to hang: vLLM's engine process and the actor that hosts
it are stopped with SIGSTOP, a reward function never returns, a rank does not join a collective (its estimator sleeps),
another is stopped. Each time the console must name it, and a report in the run's folder must have the table of pending
calls and its state or stack. Whether the run then continues is tested by `show-kills`.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil
from _common import Stopwatch, finish, sized_for_addition
from _stall_hooks import FOLDER

from verl.demo.assets import make_assets

DEADLINE_S, REWARD_S, NAMED_S = 20, 8, 30
START_S, NAMING_S = 300, 150
HERE = Path(__file__).parent
LATE = re.compile(r"has waited \d+ s, since (\d\d:\d\d:\d\d), for (.+?) to (.+?): timeout exceeded \((.+?)\)\. (.*)")
REPORT = re.compile(r"Full report: (\S+\.txt)")


@dataclass(frozen=True)
class Case:
    """`hang` makes something in a run hang and returns the pid that must be named (0: any)."""

    name: str
    hang: Callable[[Run], int]
    target: str  # in the line on the console
    timeout: str  # a pattern for its setting: it depends on which caller needs the process next
    seconds: float
    finding: str  # in the line on the console
    stack: str  # in the report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="one run with transformers' engine: a reward, and a rank")
    parser.add_argument("--only", type=int, help="index of the only run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaving a run kills its processes
    reward = Case(
        "a reward that never ends",
        lambda run: run.request("reward"),
        "reward function",
        "reward.deadline_s",
        REWARD_S,
        "did not return within",
        "in never_ends",
    )
    core = stopped("vLLM's engine process, stopped", "VLLM::EngineCore", "rollout engine 0", "generation|weights")
    actor = stopped("an engine's actor, stopped", "ray::RolloutActor", "rollout engine 0", "generation|weights")
    rank = stopped("a train worker, stopped", "ray::TrainWorker", "train worker", "train|weights")
    absent = Case(
        "a rank that misses a collective",
        lambda run: run.request("rank"),
        "train workers 0-1",
        "trainer.deadlines.train",
        DEADLINE_S,
        "did not join the collective in which train worker 0 waits: it is alive (sleeping) in never_ends",
        "never_ends",
    )
    runs = (
        [("hf", [reward, absent])]
        if options.short
        else [
            ("vllm", [reward, core]),
            ("vllm", [actor]),
            ("hf", [absent]),
            ("hf", [rank]),
        ]
    )
    results: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="verl-stall-") as directory:
        make_assets(Path(directory))
        for index, (engine, cases) in enumerate(runs):
            if options.only not in (None, index):
                continue
            with Run(Path(directory), f"run{index}", engine) as run:
                for case in cases:
                    results[case.name] = run.case(case)
    print("\n".join(f"{'reported' if late is not None else 'NOT REPORTED'}: {name}" for name, late in results.items()))
    finish(
        "stall",
        all(late is not None and late <= NAMED_S for late in results.values()),
        cases=len(results),
        seconds_after_timeout={name: late if late is None else round(late, 1) for name, late in results.items()},
        bound_s=NAMED_S,
    )


def stopped(name: str, process: str, target: str, timeout: str) -> Case:
    setting = rf"trainer\.deadlines\.({timeout})"
    return Case(name, lambda run: run.stop(process), target, setting, DEADLINE_S, "is stopped", "is stopped")


class Run:
    """One `verl train`, whose output is read line by line. Leaving it kills all its processes."""

    def __init__(self, folder: Path, name: str, engine: str) -> None:
        self.folder, self._engine = folder / name, engine
        self._assets, self._lines = folder, queue.Queue[str | None]()
        self._frozen: list[int] = []

    def __enter__(self) -> Run:
        self._requests = self.folder.parent / f"{self.folder.name}-requests"
        self._requests.mkdir()
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl", "train", *self._overrides()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            env={**os.environ, FOLDER: str(self._requests), "PYTHONPATH": path},
        )
        self._watch = Stopwatch()
        threading.Thread(target=self._read, daemon=True).start()
        self._await(r"^step\s+\d", START_S)
        return self

    def __exit__(self, *_: object) -> None:
        tree = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        self._process.terminate()
        for process in tree:
            for kind in (signal.SIGCONT, signal.SIGKILL):
                try:
                    process.send_signal(kind)
                except psutil.NoSuchProcess:
                    break
        self._process.kill()
        self._process.wait()

    def _overrides(self) -> list[str]:
        timeouts = ("generation", "train", "weights")
        return [
            *sized_for_addition(self._assets),
            f"trainer.default_local_dir={self.folder}",
            f"actor_rollout_ref.rollout.name={self._engine}",
            "data.train_batch_size=8",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.num_engines=1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "algorithm.adv_estimator=_stall_hooks:estimator",
            f"reward.custom_reward_function.path={HERE / '_stall_hooks.py'}",
            f"reward.deadline_s={REWARD_S}",
            "reward.max_failure_rate=0.5",
            "trainer.total_training_steps=100000",
            "trainer.val_before_train=False",
            *(f"trainer.deadlines.{name}={DEADLINE_S}" for name in timeouts),
        ]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(f"{self._watch.seconds():6.1f}s {line}", end="", flush=True)
            self._lines.put(line)
        self._lines.put(None)

    def _await(self, pattern: str, seconds: float) -> str | None:
        """Return the next line that matches `pattern`; None if there is none in time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left)
            except queue.Empty:
                return None
            if line is None or re.search(pattern, line):
                return line
        return None

    def request(self, name: str) -> int:
        (self._requests / name).touch()
        return 0

    def stop(self, name: str) -> int:
        matches = [
            p for p in psutil.Process(self._process.pid).children(recursive=True) if name in " ".join(p.cmdline())
        ]
        victim = max(matches, key=lambda process: process.pid)
        victim.send_signal(signal.SIGSTOP)
        return victim.pid

    def case(self, case: Case) -> float | None:
        """Return the seconds from the timeout to the report; None if it is missing or incomplete."""
        print(f"--- {case.name}", flush=True)
        pid = case.hang(self)
        line = self._await("timeout exceeded", NAMING_S)
        now, match = datetime.now(), LATE.search(line or "")
        if line is None or match is None:
            return None
        since = datetime.combine(now.date(), datetime.strptime(match[1], "%H:%M:%S").time())
        finding = match[5]
        report = REPORT.search(line)
        # Read from the run's folder: the path on the console may be redacted.
        reports = sorted((self.folder / "hangs").glob("*.txt"), key=lambda path: path.stat().st_mtime)
        text = reports[-1].read_text() if report and reports else ""
        right = {
            "the target": case.target in match[2],
            "the timeout": re.fullmatch(rf"{case.timeout}={case.seconds:g}", match[4]) is not None,
            "the finding": case.finding in finding,
            "the process": not pid or str(pid) in finding,
            "the report": case.stack in text and "Pending calls:" in text,
        }
        for name, is_right in right.items():
            if not is_right:
                print(f"WRONG: {name}")
        print(text)
        return (now - since).total_seconds() % 86400 - case.seconds if all(right.values()) else None


if __name__ == "__main__":
    main()
