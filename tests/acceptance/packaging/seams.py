"""Engines outside verl/ train a run end to end: nothing in verl/ knows them.

`tests/toy_train_engine` is a training engine in plain PyTorch and `tests/toy_rollout_engine` a rollout engine that
computes every sequence again for each token; `actor_rollout_ref.model.external_lib` names the modules that register
them. A run uses both for two steps and saves; its weights must change, and the probe must find them in the rollout
engine. In full, the run has two train ranks in processes of Ray and is resumed for a third step with the rollout engine
in another Python environment, and the contract suites of the engines run too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import ROOT, finish, train
from second_environment import make_environment

from verl.checkpoint.shards import read_tensors, read_values

ENGINES = {"train": "tests.toy_train_engine", "rollout": "tests.toy_rollout_engine"}
SUITES = (
    *("tests/contract/test_train_engine.py", "tests/distributed/test_engine_ranks.py"),
    "tests/contract/test_rollout_engine.py",
)
MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one rank in one process, without the contract suites")
    short = parser.parse_args().short
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="verl-seams-") as directory:
        folder = Path(directory)
        settings = make_settings(folder, short=short)
        steps = [2] if short else [2, 3]  # resumed for the third
        codes = [run(settings, 2)]
        if not short:
            codes.append(run([*settings, f"{ROLLOUT}.python={make_environment(folder / 'environment')}"], 3))
        figures = read_figures(folder / "run", steps[-1])
    suites = {} if short else {suite: run_suite(suite) for suite in SUITES}
    is_whole = figures["steps"] == [*range(1, steps[-1] + 1)] and figures["schedule_step"] == steps[-1]
    passed = not any(codes) and is_whole and figures["changed"] > 0 and all(suites.values())
    finish("seams", passed, engines=ENGINES, exit_codes=codes, **figures, suites=suites)


def make_settings(folder: Path, *, short: bool) -> list[str]:
    from verl.demo.assets import make_assets

    assets = make_assets(folder / "assets")
    ranks = ["trainer.local=True"] if short else ["trainer.n_gpus_per_node=2", f"{ROLLOUT}.num_engines=1"]
    return [
        *ranks,
        *(f"{MODEL}.path={assets.model}", f"{MODEL}.external_lib=[{','.join(ENGINES.values())}]"),
        *(f"{ACTOR}.strategy=toy", f"{ACTOR}.optim.lr=1e-3", f"{ROLLOUT}.name=toy", f"{ROLLOUT}.n=2"),
        *(f"+{ROLLOUT}.engine_kwargs.external.greeting=hello", f"{ROLLOUT}.max_num_seqs=2"),
        *(f"data.train_files={assets.train}", "data.train_batch_size=4", "trainer.device=cpu"),
        *("data.max_prompt_length=8", "data.max_response_length=4", "trainer.save_freq=1"),
        *(f"{ACTOR}.entropy_coeff=0.01", f"trainer.default_local_dir={folder / 'run'}"),
    ]


def run(settings: list[str], steps: int) -> int:
    code, _ = train(*settings, f"trainer.total_training_steps={steps}", deadline_s=600)
    return code


def read_figures(folder: Path, last: int) -> dict[str, Any]:
    """Return the steps of the metrics, and how many weights the last step changed."""
    log = (folder / "metrics.jsonl").read_text().splitlines()
    before, after = (dict(read_tensors(folder / f"global_step_{step}/actor", "model.")) for step in (last - 1, last))
    return {
        "steps": [json.loads(line)["step"] for line in log if "actor/grad_norm" in line],
        "changed": sum(int((tensor != before[name]).sum()) for name, tensor in after.items()),
        "weights": sum(tensor.numel() for tensor in after.values()),
        "probe_gap": max(json.loads(line)["weights/probe_gap"] for line in log if "actor/grad_norm" in line),
        "schedule_step": read_values(folder / f"global_step_{last}/actor", "schedule.")["step"],
    }


def run_suite(path: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path, "-k", "toy"]
    engines = {"VERL_TEST_ENGINES": "toy,toy_isolated", "VERL_TEST_MODULES": ENGINES["rollout"]}
    return subprocess.run(command, cwd=ROOT, env=os.environ | engines, check=False).returncode == 0


if __name__ == "__main__":
    main()
