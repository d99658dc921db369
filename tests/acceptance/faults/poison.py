"""Poison in every part of a run: each ends as promised, the last good checkpoint survives, and the cause is named.

Runs in one process each (`trainer.local=True`), in which one part is made to misbehave from the third step on: NaN
gradients, NaN weights, a learning rate of 1e30, engines with wrong log-probs (all of them, and one of two), a reward
that is infinite now and then, a tracker that cannot be reached, and full disks: for metrics, checkpoints and the object
store. Checked for each: the exit code, the words of the message, the newest complete checkpoint, that all its weights
are finite, and that the run resumes from it once the poison is gone. All runs are forked from one process that has
imported verl. `--short` (CI) is the same.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from _common import REWARDS, ROOT, finish, metrics_of, sized_for_addition
from _poison import BATCH, RESPONSES
from _poison import run as run_poisoned

from verl.checkpoint.manifest import CheckpointDir, find_corruption
from verl.checkpoint.shards import read_tensors
from verl.demo.assets import make_assets, read_problems

STEPS = 5
TIMEOUT_S = 900
HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]
)  # where the fork server finds what it preloads
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["_poison"])


@dataclass(frozen=True)
class Case:
    """A poison, and what it must lead to."""

    poison: str
    words: tuple[str, ...]  # in the output
    code: int = 2
    last: int = 2  # the newest complete checkpoint
    command: str = "train"
    settings: tuple[str, ...] = field(default=())


CASES = {
    "NaN gradients": Case(
        "nan_gradients",
        ("train worker", "training has diverged", "2 updates in a row", "max_skipped_steps"),
        last=3,
        settings=("trainer.faults.max_skipped_steps=1",),
    ),
    "NaN weights": Case("nan_weights", ("train worker", "diverged", "not the cause", "lower learning rate")),
    "a learning rate of 1e30": Case(
        "none", ("train worker", "training has diverged", "Nothing was saved"), last=0, command="sft"
    ),
    "wrong log-probs, all engines": Case(
        "wrong_engines", ("rollout engine 0 does not hold version 3", "probe_tolerance")
    ),
    "wrong log-probs, one engine": Case(
        "wrong_engine",
        ("rollout engine 1 is lost", "does not hold version 3"),
        code=0,
        last=STEPS,
    ),
    "infinite rewards": Case(
        "none",
        ("could not be scored", "inf"),
        code=0,
        last=STEPS,
        settings=(
            f"reward.custom_reward_function.path={HERE / '_infinite_rewards.py'}",
            "reward.max_failure_rate=0.9",
        ),
    ),
    "a tracker that fails": Case(
        "failing_tracker",
        ("wandb: cannot be written: connection refused", "WANDB_MODE=offline", "works again"),
        code=0,
        last=STEPS,
        settings=("trainer.logger=[console,wandb]",),
    ),
    "a full disk for metrics": Case(
        "full_metrics_disk",
        ("metrics.jsonl: cannot be written", "No space left", "df -h", "works again"),
        code=0,
        last=STEPS,
    ),
    "a full disk for checkpoints": Case(
        "full_checkpoint_disk", ("global_step_3", "No space left", "Free space", "max_ckpts_to_keep")
    ),
    "a full object store": Case(
        "full_object_store",
        ("object store of", "cannot spill", "object_store_memory"),
        settings=("trainer.save_freq=null",),  # the checkpoint is the one that it saves before it ends
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="the same")
    parser.add_argument("cases", nargs="*", help="words of the names of some cases")
    options = parser.parse_args()
    chosen = {name: case for name, case in CASES.items() if all(word in name for word in options.cases)}
    problems: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="verl-poison-") as directory:
        folder = Path(directory)
        make_assets(folder)
        rows = [{"prompt": prompt, "response": answer} for prompt, answer in read_problems(folder / "train.parquet")]
        pq.write_table(pa.Table.from_pylist(rows[:64]), folder / "sft.parquet")
        for number, (name, case) in enumerate(chosen.items()):
            run = folder / f"run-{number}"
            run.mkdir()
            problems[name] = check(case, folder, run)
            print(f"{name}: {'; '.join(problems[name]) or 'as promised'}", flush=True)
    wrong = [name for name, found in problems.items() if found]
    finish(
        "poison", bool(problems) and not wrong, cases=len(problems), as_promised=len(problems) - len(wrong), wrong=wrong
    )


def check(case: Case, folder: Path, run: Path) -> list[str]:
    """Run a poisoned run, and another one without poison after it; return what is not as promised."""
    code, output = play(case.poison, case, folder, run, *case.settings)
    problems = [f"{word!r} is not in the output" for word in case.words if word not in output]
    if code != case.code:
        problems.append(f"exit code {code}, not {case.code}")
    checkpoints = CheckpointDir(run)
    steps = [step for step in checkpoints.steps() if not find_corruption(checkpoints.step_dir(step))]
    if max(steps, default=0) != case.last:
        problems.append(f"complete checkpoints: {steps}, the last should be {case.last}")
    for step in steps:
        tensors = read_tensors(checkpoints.step_dir(step) / "actor")
        problems += [f"{name} of step {step} is not finite" for name, each in tensors if not each.isfinite().all()]
    if code == 0 and (missing := {*range(1, STEPS + 1)} - {line["step"] for line in metrics_of(run)}):
        problems.append(f"steps without metrics: {missing}")
    if code and not problems:
        kept = [each for each in case.settings if "save_freq" not in each]
        code, output = play("none", case, folder, run, *kept, "optim.lr=1e-4" if case.command == "sft" else "")
        if code or not (checkpoints.latest() == STEPS and (not case.last or "resumed from" in output)):
            problems.append(f"does not resume: exit code {code}")
    if problems:
        print(output[-3000:])
    return problems


def play(poison: str, case: Case, folder: Path, run: Path, *settings: str) -> tuple[int, str]:
    own = [
        f"model.path={folder / 'model'}",
        f"data.train_files={folder / 'sft.parquet'}",
        *("data.prompt_key=prompt", "data.response_key=response", "data.micro_batch_size_per_gpu=4", "optim.lr=1e30"),
    ]
    if case.command == "train":
        own = [
            *sized_for_addition(folder),
            *("actor_rollout_ref.rollout.name=hf", f"actor_rollout_ref.rollout.n={RESPONSES}"),
            f"reward.custom_reward_function.path={REWARDS}",
            *(f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}", "trainer.val_before_train=False"),
        ]
    arguments = [
        *(case.command, *own, "trainer.local=True"),
        *(f"data.train_batch_size={BATCH}", f"trainer.default_local_dir={run}", "trainer.resume_mode=auto"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", *filter(None, settings)),
    ]
    output = run.with_suffix(".txt")
    process = PROCESSES.Process(target=run_poisoned, args=(poison, run, arguments, output))
    process.start()
    process.join(TIMEOUT_S)
    process.kill()  # no effect if it has ended
    process.join()
    assert process.exitcode is not None
    return process.exitcode, output.read_text(errors="replace")


if __name__ == "__main__":
    main()
