import pytest

from verl.checkpoint.manifest import CheckpointDir
from verl.errors import CheckpointError

pytestmark = pytest.mark.unit


def written(root, *steps):
    checkpoints = CheckpointDir(root)
    for step in steps:
        (checkpoints.begin(step) / "shard").write_text("x")
        checkpoints.commit(step, {"data": {"position": step * 10}})
    return checkpoints


def test_nothing_saved_means_no_latest(tmp_path):
    assert CheckpointDir(tmp_path / "none").latest() is None


def test_a_committed_step_is_the_latest_and_remembers_its_data_position(tmp_path):
    checkpoints = written(tmp_path, 9, 10)
    assert checkpoints.latest() == 10
    assert checkpoints.trainer(10) == {"step": 10, "data": {"position": 100}}
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"


def test_a_step_that_was_begun_and_not_committed_is_not_there(tmp_path):
    checkpoints = written(tmp_path, 3)
    checkpoints.begin(4)
    assert checkpoints.latest() == 3
    with pytest.raises(CheckpointError, match=r"global_step_4.*not complete"):
        checkpoints.trainer(4)


def test_saving_a_step_again_is_incomplete_until_it_is_committed_again(tmp_path):
    checkpoints = written(tmp_path, 3, 4)
    assert not list(checkpoints.begin(4).iterdir())
    assert checkpoints.latest() == 3


def test_a_deleted_latest_falls_back_to_the_newest_complete_step(tmp_path):
    checkpoints = written(tmp_path, 1, 2, 30)
    (checkpoints.step_dir(30) / "trainer.json").unlink()
    assert checkpoints.latest() == 2


def test_a_user_may_name_an_older_step(tmp_path):
    checkpoints = written(tmp_path, 1, 2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1\n")
    assert checkpoints.latest() == 1


def test_prune_keeps_the_newest_and_the_one_to_resume_from(tmp_path):
    checkpoints = written(tmp_path, 8, 9, 10, 11)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    assert checkpoints.prune(2) == [9]
    assert checkpoints.steps() == [8, 10, 11]
    assert not checkpoints.step_dir(9).exists()
    assert checkpoints.prune(None) == []


def test_keeping_none_at_all_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="keep 0 must be at least 1"):
        CheckpointDir(tmp_path).prune(0)


def test_committing_what_was_never_saved_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nothing was saved"):
        CheckpointDir(tmp_path).commit(5)
