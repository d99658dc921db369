import json
import os

import pytest

from verl.checkpoint.files import make_directory, write
from verl.checkpoint.lock import run_lock
from verl.checkpoint.manifest import CheckpointDir, find_corruption
from verl.errors import CheckpointError

pytestmark = pytest.mark.unit

LATEST = "latest_checkpointed_iteration.txt"


def written(root, *steps):
    checkpoints = CheckpointDir(root)
    for step in steps:
        directory = checkpoints.begin(step)
        make_directory(directory / "actor")
        files = {f"actor/{rank}": write(directory / "actor" / str(rank), b"x" * 100) for rank in range(3)}
        checkpoints.commit(step, files, {"data": {"position": step * 10}})
    return checkpoints


def test_nothing_saved_means_no_latest(tmp_path):
    assert CheckpointDir(tmp_path / "none").latest() is None


def test_a_committed_step_is_the_latest_and_remembers_its_data_position(tmp_path):
    checkpoints = written(tmp_path, 9, 10)
    assert checkpoints.latest() == 10
    assert checkpoints.read_trainer_state(10) == {"step": 10, "data": {"position": 100}}
    assert (tmp_path / LATEST).read_text() == "10"
    assert find_corruption(checkpoints.step_dir(10)) == []
    assert not (checkpoints.step_dir(10) / "INCOMPLETE").exists()


def test_a_step_that_was_not_committed_is_not_listed(tmp_path):
    checkpoints = written(tmp_path, 3)
    checkpoints.begin(4)
    assert checkpoints.latest() == 3
    with pytest.raises(CheckpointError, match=r"global_step_4.*the save did not finish.*not complete"):
        checkpoints.read_trainer_state(4)


def test_saving_a_step_again_is_incomplete_until_it_is_committed_again(tmp_path):
    checkpoints = written(tmp_path, 3, 4)
    assert [path.name for path in checkpoints.begin(4).iterdir()] == ["INCOMPLETE"]
    assert checkpoints.latest() == 3


def test_a_deleted_latest_falls_back_to_the_newest_complete_step(tmp_path):
    checkpoints = written(tmp_path, 1, 2, 30)
    (checkpoints.step_dir(30) / "ckpt_contents.json").unlink()
    assert checkpoints.latest() == 2


def test_an_older_step_can_be_set_in_the_latest_file(tmp_path):
    checkpoints = written(tmp_path, 1, 2)
    (tmp_path / LATEST).write_text("1\n")
    assert checkpoints.latest() == 1


def test_a_rolled_back_run_does_not_resume_from_newer_steps(tmp_path):
    checkpoints = written(tmp_path, 1, 2, 3, 4, 5)
    (tmp_path / LATEST).write_text("3")
    assert checkpoints.resume_candidates() == [3, 2, 1]
    assert checkpoints.newer_steps() == [4, 5]
    (tmp_path / LATEST).unlink()
    assert checkpoints.resume_candidates() == [5, 4, 3, 2, 1]
    (tmp_path / LATEST).write_text("not a number")
    assert checkpoints.resume_candidates() == [5, 4, 3, 2, 1]


def test_prune_keeps_the_one_to_resume_from_and_those_before_it(tmp_path):
    checkpoints = written(tmp_path, 8, 9, 10, 11)
    (tmp_path / LATEST).write_text("10")
    assert checkpoints.prune(2) == [8]
    assert checkpoints.steps() == [9, 10, 11]
    assert not checkpoints.step_dir(8).exists()
    assert checkpoints.prune(None) == []


def test_newer_steps_of_an_older_run_do_not_count_as_kept(tmp_path):
    written(tmp_path, 80, 90, 100)
    for step in (10, 20, 30, 40):
        written(tmp_path, step).prune(2)
    assert CheckpointDir(tmp_path).steps() == [30, 40, 80, 90, 100]
    written(tmp_path, 50, 80).prune(2)
    assert CheckpointDir(tmp_path).steps() == [50, 80, 90, 100], "what is reached again is this run's"


def test_a_damaged_latest_checkpoint_does_not_lead_to_newer_ones(tmp_path):
    checkpoints = written(tmp_path, 100, 10)
    (checkpoints.step_dir(10) / "actor" / "0").unlink()
    assert checkpoints.latest() is None
    assert checkpoints.prune(1) == []


def test_incomplete_checkpoints_do_not_count_as_kept(tmp_path):
    checkpoints = written(tmp_path, 1, 2, 3, 4)
    (checkpoints.step_dir(4) / "actor" / "0").unlink()
    (checkpoints.step_dir(3) / "actor" / "0").write_bytes(b"short")
    assert checkpoints.prune(1) == [1]
    assert checkpoints.latest() == 2


def test_keeping_zero_checkpoints_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="keep 0 must be at least 1"):
        CheckpointDir(tmp_path).prune(0)


def test_the_next_save_deletes_only_leftovers_of_interrupted_saves_and_deletions(tmp_path, monkeypatch):
    checkpoints = written(tmp_path, 1, 2)
    checkpoints.begin(3)
    (tmp_path / "global_step_6").mkdir()  # killed before the mark was there
    foreign = tmp_path / "global_step_77" / "model.pt"
    foreign.parent.mkdir()
    foreign.write_bytes(b"of another program")

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.prune(1)
    monkeypatch.undo()
    assert checkpoints.step_dir(1).exists()
    assert checkpoints.steps() == [2]
    checkpoints.begin(5)
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == [
        "global_step_2",
        "global_step_5",
        "global_step_77",
    ]


def saved(checkpoints, step):
    """Begin a save, and return how to commit it."""
    directory = checkpoints.begin(step)
    files, trainer = {"shard": write(directory / "shard", b"x")}, {"save_id": checkpoints.save_id}
    return lambda: CheckpointDir(checkpoints.root).commit(step, files, trainer)


async def test_a_run_that_lost_its_lock_writes_and_deletes_nothing(tmp_path):
    tmp_path.chmod(0o755)
    async with run_lock(tmp_path, pytest.fail) as run_id:
        stale = CheckpointDir(tmp_path, run_id)
        for step in (1, 2):
            saved(stale, step)()
        commit = saved(stale, 7)
        (tmp_path / ".run.lock").unlink()  # as somebody does who thinks that the run has died
        async with run_lock(tmp_path, pytest.fail) as other_id:
            for work in (commit, lambda: stale.begin(8), lambda: stale.prune(1)):
                with pytest.raises(CheckpointError, match="another run has taken this folder over"):
                    work()
            assert CheckpointDir(tmp_path).steps() == [1, 2]
            saved(CheckpointDir(tmp_path, other_id), 3)()
        with pytest.raises(CheckpointError, match="another run has taken this folder over"):
            stale.begin(8)
    assert CheckpointDir(tmp_path).steps() == [1, 2, 3]
    assert CheckpointDir(tmp_path).latest() == 3


@pytest.mark.parametrize("step", [7, 8])
async def test_a_late_commit_from_before_a_restart_of_the_same_run_is_refused(tmp_path, step):
    async with run_lock(tmp_path, pytest.fail) as run_id:
        late = saved(CheckpointDir(tmp_path, run_id), 7)
        commit = saved(CheckpointDir(tmp_path, run_id), step)
        with pytest.raises(CheckpointError, match=r"global_step_7: was not committed, because this save is stale"):
            late()
        commit()
        assert CheckpointDir(tmp_path).read_trainer_state(step)["save_id"].startswith(run_id)
        assert find_corruption(CheckpointDir(tmp_path).step_dir(step)) == []


def test_commit_refuses_an_incomplete_file_by_name(tmp_path):
    checkpoints = CheckpointDir(tmp_path)
    directory = checkpoints.begin(5)
    files = {"here": write(directory / "here", b"x"), "elsewhere": write(tmp_path / "elsewhere", b"x")}
    with pytest.raises(CheckpointError, match=r"global_step_5/elsewhere.*shared file system"):
        checkpoints.commit(5, files)
    assert checkpoints.latest() is None


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda file: file.unlink(), "actor/1 is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "actor/1 has 99 bytes, 100 were written"),
        (lambda file: file.write_bytes(flipped(file.read_bytes(), 50)), r"actor/1 has changed: its SHA-256 is"),
    ],
)
def test_damage_is_named(tmp_path, harm, words):
    checkpoints = written(tmp_path, 5)
    harm(checkpoints.step_dir(5) / "actor" / "1")
    (damage,) = find_corruption(checkpoints.step_dir(5))
    assert words in damage


def test_ranks_share_the_reading_and_together_read_all(tmp_path):
    checkpoints = written(tmp_path, 5)
    for rank in range(3):
        file = checkpoints.step_dir(5) / "actor" / str(rank)
        file.write_bytes(flipped(file.read_bytes(), rank))
    damage = [find_corruption(checkpoints.step_dir(5), rank=rank, ranks=2) for rank in range(2)]
    assert all(damage)
    assert sorted(words[:7] for part in damage for words in part) == ["actor/0", "actor/1", "actor/2"]


def test_no_file_is_looked_at_by_two_ranks(tmp_path):
    checkpoints = written(tmp_path, 5)
    for rank in range(3):
        (checkpoints.step_dir(5) / "actor" / str(rank)).unlink()
    damage = [find_corruption(checkpoints.step_dir(5), rank=rank, ranks=2) for rank in range(2)]
    assert sorted(words for part in damage for words in part) == [f"actor/{rank} is missing" for rank in range(3)]


def test_every_flipped_bit_of_a_manifest_is_noticed_or_harmless(tmp_path):
    directory = written(tmp_path, 5).step_dir(5)
    manifest = directory / "ckpt_contents.json"
    whole = manifest.read_bytes()
    meant = json.loads(whole)
    for place in range(len(whole)):
        manifest.write_bytes(changed := flipped(whole, place))
        noticed = find_corruption(directory, checksums=False)
        assert noticed or json.loads(changed) == meant, place


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "actor/../../outside"])
def test_a_manifest_with_paths_outside_of_the_checkpoint_is_damaged(tmp_path, name, monkeypatch):
    monkeypatch.setattr("verl.checkpoint.manifest._size", lambda path: 1)
    checkpoints = CheckpointDir(tmp_path)
    directory = checkpoints.begin(5)
    monkeypatch.setattr("verl.checkpoint.manifest.sync_directory", lambda path: None)
    checkpoints.commit(5, {name: write(tmp_path / "outside", b"x")})
    assert "is not inside the checkpoint" in find_corruption(directory)[0]


def test_a_checkpoint_renamed_to_another_step_is_damaged(tmp_path):
    checkpoints = written(tmp_path, 5)
    os.rename(checkpoints.step_dir(5), checkpoints.step_dir(6))
    assert find_corruption(checkpoints.step_dir(6)) == ["ckpt_contents.json is damaged: it belongs to step 5"]
