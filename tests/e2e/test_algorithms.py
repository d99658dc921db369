"""The algorithms as users write them, from the command to the metrics: real Ray and FSDP2, real vLLM for PPO."""

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
TARGET_KL, HORIZON = 0.5, 40
REPEATABLE = ("actor_rollout_ref.rollout.name=hf", "trainer.deterministic=True")  # the same answers in every run


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


def test_ppo_trains_its_critic_and_resumes_with_it_and_with_the_weight_of_the_kl(
    assets: Assets, tmp_path: Path
) -> None:
    generous = tmp_path / "generous.py"  # whatever is answered: a critic that saw no reward would stay at 0
    generous.write_text("def compute_score(data_source, solution_str, *_, **__): return 1.0 + len(solution_str)")
    settings = (
        f"reward.custom_reward_function.path={generous}",
        f"critic.model.path={assets.model}",
        "critic.ppo_mini_batch_size=8",
        "critic.optim.lr=1e-3",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        f"algorithm.kl_ctrl.target_kl={TARGET_KL}",
        f"algorithm.kl_ctrl.horizon={HORIZON}",
        "trainer.save_freq=2",
        "trainer.logger=[console]",
    )
    first = train(assets, tmp_path, "ppo/ppo_config.yaml", *settings)
    assert len(steps_of(first, tmp_path)) == 2
    assert {path.name for path in (tmp_path / "global_step_2").iterdir() if path.is_dir()} == {"actor", "critic"}

    again = train(assets, tmp_path, "ppo/ppo_config.yaml", *settings, "trainer.total_training_steps=3")
    steps = steps_of(again, tmp_path)
    assert "going on with step 3" in again.stdout
    assert len(steps) == 3
    assert all(line["training/rollout_logprobs_diff_max"] < 1e-4 for line in steps)
    assert steps[0]["critic/vpred_mean"] == 0  # a new critic says 0 of everything
    assert steps[1]["critic/vpred_mean"] != 0
    assert steps[2]["critic/vpred_mean"] != 0  # with one optimiser step a step: what was restored
    assert steps[0]["actor/reward_kl"] == pytest.approx(0, abs=1e-6)
    beta = 0.001
    for line in steps:
        assert line["actor/reward_kl_coef"] == pytest.approx(beta, rel=1e-12)
        error = min(max(line["actor/reward_kl"] / TARGET_KL - 1, -0.2), 0.2)
        beta *= 1 + error * 8 / HORIZON


def test_dapo_is_grpo_with_a_wider_clip_dynamic_sampling_and_overlong_shaping(assets: Assets, tmp_path: Path) -> None:
    done = train(
        assets,
        tmp_path,
        "grpo/grpo_config.yaml",
        "actor_rollout_ref.actor.clip_ratio_low=0.2",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=score",
        "algorithm.filter_groups.max_num_gen_batches=10",
        "reward.overlong_buffer.enable=True",
        "reward.overlong_buffer.len=2",
        *REPEATABLE,
    )
    steps = steps_of(done, tmp_path)
    assert len(steps) == 2
    for line in steps:
        assert line["plan/samples"] == 8 * 4
        assert line["reward/groups_without_signal"] == 0
        assert line["sampling/groups_generated"] == 8 + line["sampling/groups_dropped"]
        assert line["reward/min"] == -1  # the reward itself is never below 0: an answer of full length paid for it
        assert "actor/kl_loss" in line
    assert sum(line["sampling/groups_dropped"] for line in steps) > 0  # most answers to most prompts hold no digit


def test_remax_with_rollout_correction(assets: Assets, tmp_path: Path) -> None:
    done = train(
        assets,
        tmp_path,
        "algorithms/remax.yaml",
        "data.train_batch_size=32",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=sequence",
        *REPEATABLE,
    )
    steps = steps_of(done, tmp_path)
    assert len(steps) == 2
    for line in steps:
        assert line["plan/samples"] == 32
        assert line["training/rollout_is_ess"] == pytest.approx(1, abs=1e-4)  # the engine draws what the trainer says
        assert line["training/rollout_rejected"] == 0
        assert line["actor/grad_norm"] > 0


def test_an_estimator_that_cannot_be_imported_ends_the_run_with_the_mend(assets: Assets, tmp_path: Path) -> None:
    done = train(
        assets,
        tmp_path,
        "algorithms/grpo.yaml",
        "algorithm.adv_estimator=nowhere_at_all:mine",
        "actor_rollout_ref.rollout.name=hf",
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "algorithm.adv_estimator: 'nowhere_at_all:mine' cannot be imported" in done.stderr
    assert "PYTHONPATH" in done.stderr
    assert "Traceback" not in done.stderr
