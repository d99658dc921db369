"""A step that a run has recorded is repeated by the command, with a real model in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from verl.cli import main
from verl.demo.assets import make_assets

pytestmark = pytest.mark.contract

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 7 / 7
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs of two mini-batches in each step, with a KL to a reference."""
    folder = tmp_path_factory.mktemp("replay")
    assets, reward = make_assets(folder), folder / "reward.py"
    reward.write_text(REWARD)
    settings = (
        *(f"data.train_files={assets.train}", f"model.path={assets.model}", "rollout.name=hf", "rollout.n=2"),
        *("data.max_prompt_length=8", "data.max_response_length=4", "data.train_batch_size=4"),
        *("actor.ppo_mini_batch_size=3", "actor.ppo_micro_batch_size_per_gpu=4", "actor.ppo_epochs=2"),
        *("actor.use_kl_loss=True", "optim.lr=1e-3", "trainer.total_training_steps=2", "trainer.save_freq=-1"),
        *("trainer.n_gpus_per_node=1", "trainer.local=True", "trainer.replay.steps=2"),
        *("trainer.deterministic=True", f"reward.custom_reward_function.path={reward}"),
    )
    assert main(["train", *settings, f"trainer.default_local_dir={folder / 'run'}"]) == 0
    return folder / "run"


def test_the_step_is_repeated_and_one_sample_is_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--step", "2", "--sample", "5/1"]) == 0
    printed = capsys.readouterr().out
    assert "8 samples of 1 rank on cpu, 4 updates" in printed
    assert "the same: no metric differs by more than 1e-06" in printed
    updates = re.findall(r"^update (\d): the sample's share of the loss is", printed, re.MULTILINE)
    assert len(updates) == 2  # one in each epoch
    ratios = [float(row.split()[5]) for row in printed.splitlines() if re.match(r" +\d+ +\d+ +-\d", row)]
    assert len(ratios) == 8
    assert ratios[:4] == [1.0] * 4 or updates[0] != "1"
    assert ratios[4:] != [1.0] * 4


def test_other_settings_have_other_results(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--step", "2", "--json", "actor.clip_ratio=0.001"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert "actor/pg_loss" in result["differing"]
    assert "critic/score/mean" not in result["differing"]


def test_trainer_and_engine_agree_in_all_layers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--step", "2", "--compare-engine"]) == 0
    assert "trainer and engine agree in all layers" in capsys.readouterr().out


def test_what_was_not_recorded_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--step", "1"]) == 2
    assert "step 1 is not recorded (recorded: 2)" in capsys.readouterr().err
    assert main(["replay", str(run), "--step", "2", "--sample", "77/0"]) == 2
    assert "has no sample 77/0; its groups are 4, 5, 6, 7, with responses from 0 on" in capsys.readouterr().err
    assert main(["replay", str(run), "--step", "2", "--sample", "77"]) == 2
    assert "is not GROUP/INDEX" in capsys.readouterr().err
