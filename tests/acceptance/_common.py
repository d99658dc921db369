"""What the proofs share: a run as a user would start it, its metrics, and the JSON line at the end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import psutil

ROOT = Path(__file__).resolve().parents[2]
ENDING_S = 60.0
REWARDS = Path(__file__).with_name("_rewards.py")
sys.path.insert(0, str(ROOT / "tests"))  # for what proofs and tests share
os.environ.setdefault("RAY_ADDRESS", "local")  # a cluster of its own, whatever else runs on this machine


def finish(name: str, passed: bool, **figures: Any) -> NoReturn:
    """The last line of a proof, and its exit code."""
    print(json.dumps({"name": name, **figures, "pass": bool(passed)}), flush=True)
    sys.exit(0 if passed else 1)


def skip(name: str, reason: str) -> NoReturn:
    """The last line and the exit code of a proof that cannot run on this machine. This is not a pass."""
    print(json.dumps({"name": name, "skipped": reason, "pass": False}), flush=True)
    sys.exit(os.EX_UNAVAILABLE)


def left_behind(mark: str) -> list[str]:
    """Return processes with a variable of this name that are still alive a while later."""
    until = time.monotonic() + ENDING_S
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if mark in process.environ():
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        if not found or time.monotonic() > until:
            return found
        time.sleep(1)


def train(*overrides: str, deadline_s: float, config: str | None = None) -> tuple[int, Stopwatch]:
    """`verl train` in a process of its own, shown as it goes: (exit code, the time it took)."""
    command = [sys.executable, "-m", "verl", "train"]
    if config is not None:
        path = ROOT / config
        command += ["--config-path", str(path.parent), "--config-name", path.stem]
    watch = Stopwatch()
    process = subprocess.Popen(
        [*command, *overrides], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(f"{watch.seconds():6.1f}s {line}", end="", flush=True)
            if watch.seconds() > deadline_s:
                process.terminate()
                break
        code = process.wait(timeout=60)
    except BaseException:
        process.kill()
        raise
    return code, watch


class Stopwatch:
    """Seconds since it was made; and how many of them this machine's cores were really ours.

    On a virtual machine the host may take the cores away ("steal" in /proc/stat). A bound on time on 2 cores is held
    against the time that there were 2 cores; both figures are printed.
    """

    def __init__(self) -> None:
        self._start, self._ticks = time.time(), _ticks()

    def seconds(self) -> float:
        return time.time() - self._start

    def stolen(self) -> float:
        """Share of the cores' time that the host took away."""
        stolen, total = (now - then for now, then in zip(_ticks(), self._ticks, strict=True))
        return stolen / total if total else 0.0

    def own_seconds(self) -> float:
        return self.seconds() * (1 - self.stolen())


def _ticks() -> tuple[int, int]:
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0, 0
    fields = [int(field) for field in stat.read_text().splitlines()[0].split()[1:9]]
    return fields[7], sum(fields)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def sized_for_addition(folder: Path) -> list[str]:
    """What must be replaced in settings meant for a 7B model and GSM8K: model, paths and sizes."""
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'test.parquet'}",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=256",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "trainer.n_gpus_per_node=2",
        f"trainer.default_local_dir={folder / 'run'}",
        "trainer.resume_mode=disable",
        "trainer.save_freq=-1",
    ]


def short_grpo(folder: Path, *, prompts: int, steps: int) -> list[str]:
    """Settings of a GRPO run of few steps on additions, without validation and checkpoints."""
    return [
        *sized_for_addition(folder),
        f"data.train_batch_size={prompts}",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "actor_rollout_ref.rollout.n=4",
        f"reward.custom_reward_function.path={REWARDS}",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=False",
    ]
