"""A run of `verl train` that is killed at random moments and started again, until it is done."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from _common import sized_for_addition  # isort: skip - puts tests/ on the path
import psutil

from verl.checkpoint.manifest import LATEST

BATCH = 8
ENGINES = ("VLLM::EngineCore", "ray::RolloutActor")


class KilledRun:
    """A run that saves after every second step, with the data of `make_assets` in the folder above its own."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        wanted: int,
        chance: random.Random,
        *settings: str,
        engine: str,
        max_staleness: int,
        kills_engines: bool = False,
        resumes_always: bool = False,
    ) -> None:
        """With `resumes_always`, it is not killed before it has saved: it would start over."""
        self.folder, self.steps, self._wanted, self._chance = folder, steps, wanted, chance
        self.kills = self.resumes = self.engines_killed = 0
        self._step = 0
        self._kills_engines, self._resumes_always = kills_engines, resumes_always
        self._settings = [
            *sized_for_addition(folder.parent),
            f"trainer.default_local_dir={self.folder}",
            "trainer.resume_mode=auto",
            "trainer.n_gpus_per_node=1",
            f"trainer.max_staleness={max_staleness}",
            f"data.train_batch_size={BATCH}",
            "data.shuffle=False",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
            "actor_rollout_ref.actor.optim.lr=1e-4",
            f"actor_rollout_ref.rollout.name={engine}",
            "actor_rollout_ref.rollout.num_engines=1",
            "actor_rollout_ref.rollout.n=4",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=2",
            "trainer.val_before_train=False",
            "trainer.faults.max_restarts=10",
            *settings,
        ]

    def play(self) -> int:
        """Return the exit code of the run's last process."""
        while (code := self._run_once()) == -signal.SIGKILL and self.kills <= self._wanted:
            self.resumes += 1
        return code

    def _run_once(self) -> int:
        command = [sys.executable, "-m", "verl", "train", *self._settings]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
        has_ended = threading.Event()
        killer = threading.Thread(target=self._kill_later, args=(process, has_ended), daemon=True)
        killer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                if found := re.match(r"step +(\d+)/", line):
                    self._step = int(found[1])
            return process.wait(timeout=120)
        finally:
            has_ended.set()
            process.kill()
            killer.join()

    def _kill_later(self, process: subprocess.Popen[str], has_ended: threading.Event) -> None:
        """Kill the process, or its engine, some steps later; a run that is nearly over is left alone."""
        while self.kills < self._wanted and not has_ended.is_set():
            since, steps, longest_s = self._step, self._chance.randint(1, 4), 1.5
            if self._resumes_always and not self._has_saved():
                longest_s = 0.5
                while not (self._has_saved() or has_ended.wait(0.05)):
                    pass
            else:
                while self._step < since + steps and not has_ended.wait(0.05):
                    pass
            if has_ended.wait(self._chance.uniform(0.0, longest_s)) or self._step >= self.steps - 1:
                return
            victim = self._find_engine(process.pid) if self._kills_engines and self._chance.random() < 0.25 else None
            self.kills += 1
            self.engines_killed += victim is not None
            print(f"killed {'an engine' if victim else 'the controller'} after step {self._step}", flush=True)
            os.kill(victim or process.pid, signal.SIGKILL)
            if victim is None:
                return

    def _has_saved(self) -> bool:
        return (self.folder / LATEST).exists()

    def _find_engine(self, controller: int) -> int | None:
        children = psutil.Process(controller).children(recursive=True)
        found = [child.pid for child in children if any(name in " ".join(child.cmdline()) for name in ENGINES)]
        return self._chance.choice(sorted(found)) if found else None
