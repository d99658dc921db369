"""A run that crashes says why: the first cause, the process and a file to read, in the last 20 lines that it prints.

Runs of `verl train` with two train ranks, in each of which a method fails in one process: it raises, runs out of
memory, exits, or gets a signal. The file has to exist, and to have the cause as well.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from _common import ENDING_S, finish, short_grpo

from verl.demo.assets import make_assets

SITE = Path(__file__).with_name("_crash_site")
LAST_LINES, RUN_S = 20, 200
TRAINER, WORKER = "verl.training.policy.trainer:PolicyTrainer", "verl.workers.train_base:BaseTrainWorker"
ENGINE, EPISODES = "verl.rollout.hf:HfEngine", "verl.workers.episodes:EpisodeWorker"
PLANTED, DIED = "planted by the test", "its process has died"


@dataclass(frozen=True)
class Crash:
    """Call number `call` of `method` on `rank` fails; the end of the output has to have `process` and `cause`."""

    method: str
    call: int
    rank: int
    how: str
    process: str
    cause: str
    phase: str = ""
    settings: tuple[str, ...] = ()


RANK_0, RANK_1, ENGINE_0, EPISODES_0 = "train worker 0", "train worker 1", "rollout engine 0", "episode worker 0"
STARTING, PREPARING, UPDATING = "while starting the train workers", "while computing log-probs", "while updating"
SENDING, GENERATING, SAVING = "while sending the weights", "while generating", "while saving"
CRASHES = (
    Crash(f"{TRAINER}.update", 2, 1, "ValueError", RANK_1, f"ValueError: {PLANTED}", UPDATING),
    Crash(f"{TRAINER}.update", 1, 0, "OutOfMemoryError", RANK_0, "ppo_micro_batch_size_per_gpu", UPDATING),
    Crash(f"{TRAINER}.prepare", 1, 1, "SIGKILL", RANK_1, DIED, PREPARING),
    Crash(f"{EPISODES}._run_group", 1, 0, "TypeError", EPISODES_0, f"TypeError: {PLANTED}", GENERATING),
    Crash("verl.data.plan:Planner.plan", 2, 0, "KeyError", "plan.py", f"KeyError: '{PLANTED}'", "while planning"),
    Crash(f"{TRAINER}.__init__", 1, 1, "ValueError", RANK_1, f"ValueError: {PLANTED}", STARTING),
    Crash(f"{TRAINER}.__init__", 1, 0, "SIGKILL", RANK_0, DIED, STARTING),
    Crash(f"{WORKER}.join", 1, 0, "OSError", "train worker", f"OSError: {PLANTED}", STARTING),
    Crash(f"{TRAINER}.prepare", 2, 0, "RuntimeError", RANK_0, f"RuntimeError: {PLANTED}", PREPARING),
    Crash(f"{TRAINER}.prepare", 1, 0, "OutOfMemoryError", RANK_0, "ppo_micro_batch_size_per_gpu", PREPARING),
    Crash(f"{TRAINER}.update", 1, 1, "SIGSEGV", RANK_1, "Segmentation fault", UPDATING),
    Crash(f"{TRAINER}.update", 1, 0, "exit", RANK_0, "the code has called exit", UPDATING),
    Crash(f"{TRAINER}.update", 1, 1, "SystemExit", RANK_1, DIED, UPDATING),
    Crash(f"{TRAINER}.update", 1, 0, "SIGABRT", RANK_0, "Aborted", UPDATING),
    Crash(f"{WORKER}._write", 1, 1, "OSError", RANK_1, f"OSError: {PLANTED}", SAVING),
    Crash(f"{WORKER}.save", 1, 0, "SIGKILL", RANK_0, DIED, ""),
    Crash("verl.workers.weight_packer:WeightPacker.pack_next", 4, 0, "ValueError", RANK_0, PLANTED, SENDING),
    Crash("verl.workers.weight_packer:WeightPacker.take_part", 2, 1, "SIGKILL", RANK_1, DIED, SENDING),
    Crash(f"{ENGINE}.start", 1, 0, "RuntimeError", ENGINE_0, f"RuntimeError: {PLANTED}", "while starting the rollout"),
    Crash(f"{ENGINE}.start", 1, 0, "SIGKILL", ENGINE_0, DIED, "while starting the rollout"),
    Crash(f"{ENGINE}.generate_all", 2, 0, "IndexError", ENGINE_0, f"IndexError: {PLANTED}", GENERATING),
    Crash(f"{ENGINE}.load_bucket", 3, 0, "ValueError", ENGINE_0, f"ValueError: {PLANTED}", SENDING),
    Crash(f"{EPISODES}.start", 1, 0, "ImportError", EPISODES_0, f"ImportError: {PLANTED}", "starting the episode"),
    Crash(f"{EPISODES}._run_group", 2, 0, "SIGKILL", EPISODES_0, DIED, GENERATING),
    Crash("verl.trainer.evaluator:Evaluator.evaluate", 1, 0, "KeyError", "evaluator.py", PLANTED, "validating"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="the first three crashes")
    parser.add_argument("--only", type=int, help="index of the only crash")
    options = parser.parse_args()
    crashes = CRASHES[:3] if options.short else CRASHES if options.only is None else CRASHES[options.only :][:1]
    wrong: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="verl-crash-") as directory:
        make_assets(Path(directory))
        for index, crash in enumerate(crashes):
            name = f"{crash.method.partition(':')[2]} {crash.how}"
            if missing := find_missing(crash, Path(directory), index):
                wrong[name] = missing
            print(f"{'NOT NAMED: ' + ', '.join(missing) if missing else 'named'}: {name}\n", flush=True)
    named = len(crashes) - len(wrong)
    finish("crash", named >= len(crashes) - len(crashes) // 25, crashes=len(crashes), named=named, wrong=wrong)


def find_missing(crash: Crash, assets: Path, index: int) -> list[str]:
    """Return what the last lines of a run with this crash do not say."""
    folder = assets / f"run{index}"
    settings = [
        *short_grpo(assets, prompts=4, steps=3),
        f"trainer.default_local_dir={folder}",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
        "trainer.faults.max_restarts=0",
        "trainer.deadlines.reply=20",  # the wait for a rank that is stuck in a collective
        *crash.settings,
    ]
    plan = f"{crash.method} {crash.call} {crash.rank} {crash.how}"
    path = os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "verl", "train", *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "VERL_SHOW_CRASH": plan, "PYTHONPATH": path},
        timeout=RUN_S + ENDING_S,
    )
    end = "\n".join(done.stdout.splitlines()[-LAST_LINES:])
    print(f"--- {plan}\n{end}", flush=True)
    report = re.search(r"full report: (\S+\.txt)", end)
    files = sorted((folder / "errors").glob("*.txt"))
    checks = {
        "the exit code": done.returncode != 0,
        "the process": crash.process in end,
        "the cause": crash.cause in end,
        "the phase": crash.phase in end,
        "the report": report is not None and bool(files) and crash.cause in files[-1].read_text(),
    }
    return [name for name, is_right in checks.items() if not is_right]


if __name__ == "__main__":
    main()
