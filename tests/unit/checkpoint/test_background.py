"""Saving in the background, on one rank: the state at the call is written, and errors have the path."""

import errno
import threading

import pytest
import torch

from verl.checkpoint import background
from verl.checkpoint.background import BackgroundWriter
from verl.checkpoint.files import ChecksummedFile, write
from verl.checkpoint.manifest import CheckpointDir, find_corruption
from verl.checkpoint.shards import read_tensors
from verl.errors import CheckpointError

pytestmark = pytest.mark.unit


@pytest.fixture
def writer():
    return BackgroundWriter()


def save(writer, root, step, states, **more):
    writer.start(states, CheckpointDir(root).begin(step), {"data": {"position": step}}, **more)


def test_a_checkpoint_is_complete_when_it_is_written(tmp_path, writer):
    save(writer, tmp_path, 3, {"actor": {"model": {"a": torch.ones(4)}}, "critic": {"model": {"a": torch.zeros(2)}}})
    assert writer.poll(wait=True)
    checkpoints = CheckpointDir(tmp_path)
    assert find_corruption(checkpoints.step_dir(3)) == []
    assert checkpoints.latest() == 3
    assert checkpoints.read_trainer_state(3)["data"] == {"position": 3}
    assert {path.name for path in checkpoints.step_dir(3).iterdir()} >= {"actor", "critic"}


def test_training_goes_on_while_the_copy_is_written(tmp_path, writer, monkeypatch):
    let_go = threading.Event()
    real = background.save

    def slow(*args, **kwargs):
        assert let_go.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(background, "save", slow)
    weight = torch.ones(4)
    save(writer, tmp_path, 1, {"actor": {"model": {"a": weight}}})
    weight.fill_(2.0)
    assert not writer.poll(wait=False)
    assert CheckpointDir(tmp_path).latest() is None
    let_go.set()
    assert writer.poll(wait=True)
    assert writer.seconds > 0
    assert dict(read_tensors(tmp_path / "global_step_1" / "actor"))["model.a"].equal(torch.ones(4))


def test_an_error_is_raised_once_with_the_path_and_the_previous_checkpoint_is_intact(tmp_path, writer, monkeypatch):
    states = {"actor": {"model": {"a": torch.ones(4)}}}
    save(writer, tmp_path, 1, states)
    assert writer.poll(wait=True)

    def full(self, data):
        self.error = OSError(errno.ENOSPC, "No space left on device", str(self.path))
        raise self.error

    directory = CheckpointDir(tmp_path).begin(2)
    monkeypatch.setattr(ChecksummedFile, "write", full)
    writer.start(states, directory, {})
    with pytest.raises(
        CheckpointError, match=r"No space left on device: '.*global_step_2/actor/shard-00001-of-.*safetensors'"
    ):
        writer.poll(wait=True)
    assert writer.poll(wait=False), "an error is raised once"
    assert CheckpointDir(tmp_path).latest() == 1
    monkeypatch.undo()
    save(writer, tmp_path, 3, states)
    assert writer.poll(wait=True)
    assert CheckpointDir(tmp_path).steps() == [1, 3]


def test_finishers_run_between_the_shards_and_the_commit(tmp_path, writer):
    def export(directory):
        assert (directory / "actor" / "metadata.json").exists()
        assert not (directory / "ckpt_contents.json").exists()
        return {"extra.txt": write(directory / "extra.txt", b"more")}

    save(writer, tmp_path, 1, {"actor": {"model": {"a": torch.ones(4)}}}, finishers=[export])
    assert writer.poll(wait=True)
    (tmp_path / "global_step_1" / "extra.txt").unlink()
    assert find_corruption(tmp_path / "global_step_1") == ["extra.txt is missing"]
