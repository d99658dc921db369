"""A killed asynchronous run trains on every prompt once, those that take long included.

make show-async-resume [ARGS="--kills 30"]

A run with `trainer.max_staleness=2`, Ray and vLLM, in which the reward of one prompt in four takes as long as several
steps. It saves after every second step, and is killed (SIGKILL) at random moments with episodes in flight: mostly the
controller, which is started again, sometimes an engine. Held at the end: `verl audit` proves from the run's folder that
every position of the data was trained once, no response was too old, and every checkpoint and every resume continued
with exactly the positions that were not done; the trained positions are all from the first to the last, so that slow
prompts are as frequent among them as in the data; some steps trained responses of older weights.

`--short`: 2 kills, of the controller, with transformers instead of vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from _common import finish, sized_for_addition  # isort: skip - puts tests/ on the path
import psutil
from _uneven_rewards import is_long

from verl.commands.runs.audit import audit_run
from verl.demo.assets import make_assets

BATCH, STALENESS = 8, 2
ENGINES = ("VLLM::EngineCore", "ray::RolloutActor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--kills", type=int)
    parser.add_argument(
        "--seed", type=int, help="of the moments; a new one each time, in the short form always the same"
    )
    options = parser.parse_args()
    wanted = options.kills or (2 if options.short else 30)
    seed = options.seed if options.seed is not None else 3 if options.short else random.randrange(10**6)
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="verl-async-resume-") as directory:
        folder = Path(directory)
        assets = make_assets(folder)
        run = KilledRun(folder, 10 if options.short else 4 * wanted, wanted, random.Random(seed), short=options.short)
        code = run.play()
        audit = audit_run(run.folder)
        trained = list_trained(run.folder)
        slow = [is_long(truth) for truth in read_truths(assets.train)]
    is_complete = sorted(trained) == list(range(run.steps * BATCH))
    finish(
        "async_resume",
        code == 0 and not audit.problems and is_complete and run.kills >= wanted and max(audit.staleness) > 0,
        seed=seed,
        kills=run.kills,
        resumes=run.resumes,
        engines_killed=run.engines_killed,
        exit_code=code,
        steps=audit.steps,
        trained=audit.trained,
        missing=sorted(set(range(run.steps * BATCH)) - set(trained))[:10],
        staleness=dict(sorted(audit.staleness.items())),
        allowed=STALENESS,
        checkpoints_compared=audit.checkpoints,
        problems=audit.problems[:5],
        slow_in_the_data=round(sum(slow) / len(slow), 3),
    )


class KilledRun:
    """A run of `verl train` that is killed at random moments, and started again."""

    def __init__(self, folder: Path, steps: int, wanted: int, chance: random.Random, *, short: bool) -> None:
        self.folder, self.steps, self._wanted, self._chance = folder / "killed", steps, wanted, chance
        self.kills = self.resumes = self.engines_killed = 0
        self._step = 0
        self._kills_engines = not short
        self._settings = [
            *sized_for_addition(folder),
            f"trainer.default_local_dir={self.folder}",
            "trainer.resume_mode=auto",
            "trainer.n_gpus_per_node=1",
            f"trainer.max_staleness={STALENESS}",
            f"data.train_batch_size={BATCH}",
            "data.shuffle=False",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
            "actor_rollout_ref.actor.optim.lr=1e-4",
            f"actor_rollout_ref.rollout.name={'hf' if short else 'vllm'}",
            "actor_rollout_ref.rollout.num_engines=1",
            "actor_rollout_ref.rollout.n=4",
            f"reward.custom_reward_function.path={Path(__file__).with_name('_uneven_rewards.py')}",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=2",
            "trainer.val_before_train=False",
            "trainer.faults.max_restarts=10",
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
            since, steps = self._step, self._chance.randint(1, 4)
            while self._step < since + steps and not has_ended.wait(0.05):
                pass
            if has_ended.wait(self._chance.uniform(0.0, 1.5)) or self._step >= self.steps - 1:
                return
            victim = self._find_engine(process.pid) if self._kills_engines and self._chance.random() < 0.25 else None
            self.kills += 1
            self.engines_killed += victim is not None
            print(f"killed {'an engine' if victim else 'the controller'} after step {self._step}", flush=True)
            os.kill(victim or process.pid, signal.SIGKILL)
            if victim is None:
                return

    def _find_engine(self, controller: int) -> int | None:
        children = psutil.Process(controller).children(recursive=True)
        found = [child.pid for child in children if any(name in " ".join(child.cmdline()) for name in ENGINES)]
        return self._chance.choice(sorted(found)) if found else None


def list_trained(folder: Path) -> list[int]:
    records = [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]
    return [position for record in records for position, *_ in record.get("trained", [])]


def read_truths(path: Path) -> list[str]:
    import pyarrow.parquet as parquet

    return [row["ground_truth"] for row in parquet.read_table(path)["reward_model"].to_pylist()]


if __name__ == "__main__":
    main()
