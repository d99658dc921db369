"""From settings to a run: decisions before any process starts."""

from pathlib import Path

import pytest

from verl.config.load import load
from verl.trainer.build.rl_builder import RLBuilder
from verl.trainer.build.runtime import with_absolute_paths
from verl.trainer.launcher import with_sweep_folder
from verl.trainer.train_loop import LoopSchedule

pytestmark = pytest.mark.unit

REQUIRED = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "actor_rollout_ref.rollout.n=8")


def test_points_of_a_sweep_have_checkpoint_directories_of_their_own() -> None:
    points = load(["-m", "actor_rollout_ref.actor.optim.lr=1e-5,1e-6", *REQUIRED])
    folders = [with_sweep_folder(point).trainer.checkpoint_dir for point in points]
    assert len(set(folders)) == 2
    assert all(folder.parent == Path("checkpoints/verl/default") for folder in folders)


def test_without_a_sweep_the_checkpoint_directory_is_as_documented() -> None:
    [loaded] = load(REQUIRED)
    assert with_sweep_folder(loaded).trainer.checkpoint_dir == Path("checkpoints/verl/default")


def test_local_paths_are_made_absolute_and_names_on_a_hub_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.parquet").touch()
    Path("rewards.py").touch()
    [loaded] = load([*REQUIRED, "reward.custom_reward_function.path=rewards.py"])
    config = with_absolute_paths(loaded.config, RLBuilder.paths)
    assert config.data.train_files == str(tmp_path / "train.parquet")
    assert config.reward.custom_reward_function.path == str(tmp_path / "rewards.py")
    assert config.actor_rollout_ref.model.path == "model", "no such folder: a name on a hub"
    assert config.trainer.checkpoint_dir == tmp_path / "checkpoints/verl/default"


@pytest.mark.parametrize(("every", "due"), [(-1, []), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_saving_comes_at_its_interval_and_at_the_end(every: int, due: list[int]) -> None:
    schedule = LoopSchedule(batch=1, total_steps=5, save_every=every, validate_every=every)
    assert [step for step in range(1, 6) if schedule.saves_at(step)] == due
    assert [step for step in range(1, 6) if schedule.validates_at(step)] == due
