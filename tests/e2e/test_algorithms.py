"""Algorithms as users write them, from the command to the metrics. How they learn with vLLM is shown by
`make show-algorithms`, DAPO's sampling by `show-dapo`, and how PPO resumes with its critic by `show-resume`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl.demo.folder import Assets

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
LOCAL = ("actor_rollout_ref.rollout.name=hf", "trainer.local=True")


def train(assets: Assets, folder: Path, example: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """An example of ours with its model, paths and sizes replaced, for 2 steps of 8 prompts."""
    config = ROOT / "examples" / example
    settings = [
        f"actor_rollout_ref.model.path={assets.model}",
        f"data.train_files={assets.train}",
        f"data.val_files={assets.test}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"reward.custom_reward_function.path={ROOT / 'tests/acceptance/_rewards.py'}",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=False",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={folder}",
    ]
    command = [sys.executable, "-m", "verl", "train", "--config-path", str(config.parent), "--config-name", config.stem]
    return subprocess.run([*command, *settings, *overrides], capture_output=True, text=True, timeout=900)


def steps_of(done: subprocess.CompletedProcess[str], folder: Path) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert not any(line["actor/skipped_steps"] for line in steps)
    return steps


@pytest.mark.rotating(5)
def test_remax_with_rollout_correction(assets: Assets, tmp_path: Path) -> None:
    done = train(
        assets,
        tmp_path,
        "algorithms/remax.yaml",
        "data.train_batch_size=32",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=sequence",
        *LOCAL,
        "trainer.deterministic=True",
    )
    steps = steps_of(done, tmp_path)
    assert len(steps) == 2
    for line in steps:
        assert line["plan/samples"] == 32
        assert line["training/rollout_is_ess"] == pytest.approx(1, abs=1e-4)  # engine and trainer agree
        assert line["training/rollout_rejected"] == 0
        assert line["actor/grad_norm"] > 0


@pytest.mark.rotating(4)
def test_an_estimator_that_cannot_be_imported_ends_the_run_with_a_fix(assets: Assets, tmp_path: Path) -> None:
    done = train(
        assets,
        tmp_path,
        "algorithms/grpo.yaml",
        "algorithm.adv_estimator=nowhere_at_all:mine",
        *LOCAL,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "algorithm.adv_estimator: 'nowhere_at_all:mine' cannot be imported" in done.stderr
    assert "PYTHONPATH" in done.stderr
    assert "Traceback" not in done.stderr
