"""Without staleness a run is what it was before asynchronous training existed, to the bit.

make show-deterministic [ARGS=--short]

The same deterministic runs with this checkout and with the last commit before asynchronous training, which is taken
from the history of the repository: GRPO, and DAPO with dynamic sampling, two ranks, Ray and vLLM. Held: all metrics are
equal, except times, those that did not exist, and the gap of the probe, which has had other sequences since; and so are
all tensors of the last checkpoint.

`--short`: one process without Ray, with transformers as the engine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import ROOT, finish, metrics_of, short_grpo, skip  # isort: skip - puts tests/ on the path
import torch

from verl.checkpoint.shards import read_tensors
from verl.demo.assets import make_assets

BEFORE = "e61513f115167aa863c6263c8c733caaf2697f1b"
STEPS = 4
IGNORED = ("time", "timing_s/", "perf/", "faults/", "weights/probe_gap")
RUNS = {
    "grpo": ["actor_rollout_ref.actor.use_kl_loss=True"],
    "dapo": [
        "algorithm.filter_groups.enable=True",
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="verl-deterministic-") as directory:
        folder, before = Path(directory), Path(directory) / "before"
        if not extract(BEFORE, before):
            skip("deterministic", f"the history of this checkout does not have the commit {BEFORE[:12]}")
        make_assets(folder)
        differences, compared = dict[str, list[str]](), 0
        for name, overrides in RUNS.items():
            runs = []
            for tree in (ROOT, before):
                run = folder / f"{name}-{'now' if tree == ROOT else 'before'}"
                settings = [*settings_of(folder, short=options.short), *overrides, f"trainer.default_local_dir={run}"]
                environment = os.environ | {"PYTHONPATH": str(tree)}
                code = subprocess.run([sys.executable, "-m", "verl", "train", *settings], cwd=tree, env=environment)
                if code.returncode != 0:
                    finish("deterministic", False, run=run.name, exit_code=code.returncode)
                runs.append(run)
            differences[name], count = compare(*runs)
            compared += count
    finish("deterministic", not any(differences.values()), before=BEFORE[:12], compared=compared, different=differences)


def extract(commit: str, folder: Path) -> bool:
    """Write the package as of a commit; return whether the history has it."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit, "verl"], cwd=ROOT, capture_output=True)
    return archive.returncode == 0 and subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout).returncode == 0


def settings_of(folder: Path, *, short: bool) -> list[str]:
    settings = [*short_grpo(folder, prompts=8, steps=STEPS), "trainer.deterministic=True", f"trainer.save_freq={STEPS}"]
    if short:
        settings += ["trainer.local=True", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=hf"]
    return settings


def compare(now: Path, before: Path) -> tuple[list[str], int]:
    """Return the names of what differs, and the number of what was compared."""
    different, count = [], 0
    for own, other in zip(steps_of(now), steps_of(before), strict=True):
        known = [name for name in other if not name.startswith(IGNORED)]
        count += len(known)
        different += [f"step {other['step']}: {name}" for name in known if own.get(name) != other[name]]
    tensors = [dict(read_tensors(run / f"global_step_{STEPS}" / "actor")) for run in (now, before)]
    count += len(tensors[1])
    different += [f"tensor {name}" for name in tensors[0].keys() ^ tensors[1].keys()]
    both = sorted(tensors[0].keys() & tensors[1].keys())
    different += [f"tensor {name}" for name in both if not torch.equal(tensors[0][name], tensors[1][name])]
    return different, count


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics_of(run) if "reward/mean" in line]


if __name__ == "__main__":
    main()
