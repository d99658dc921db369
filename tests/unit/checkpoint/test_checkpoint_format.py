import errno
import json
import os
import pickle

import pytest
import torch

from verl.checkpoint.files import SummedFile, sum_of, write
from verl.checkpoint.format import METADATA, entries, read_tensors
from verl.checkpoint.save import load, save
from verl.errors import CheckpointError

pytestmark = pytest.mark.unit

SHARD = "__0_0.distcp"


@pytest.fixture
def saved(tmp_path):
    state = {
        "model": {"a.weight": torch.arange(12.0).reshape(4, 3), "b": torch.tensor(7, dtype=torch.int64)},
        "optimizer": {"betas": (0.9, 0.999), "fused": True, "foreach": None},
    }
    save(state, tmp_path / "actor")
    return tmp_path / "actor"


def rewritten(directory, change):
    written = json.loads((directory / METADATA).read_text())
    change(written["entries"])
    (directory / METADATA).write_text(json.dumps(written))


def test_one_process_reads_whole_tensors_without_a_model(saved):
    found = dict(read_tensors(saved, prefix="model."))
    assert list(found) == ["a.weight", "b"]
    assert found["a.weight"].equal(torch.arange(12.0).reshape(4, 3))
    assert found["b"].equal(torch.tensor(7))


def test_plain_values_are_json(saved):
    state = {"optimizer": {"betas": (0.0, 0.0), "fused": False, "foreach": True}}
    assert load(state, saved)["optimizer"] == {"betas": [0.9, 0.999], "fused": True, "foreach": None}


def test_what_json_cannot_say_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"extra\.thing: .* cannot be kept"):
        save({"extra": {"thing": object()}}, tmp_path)


def test_the_sums_are_those_of_the_files(tmp_path):
    sums = save({"a": torch.randn(5)}, tmp_path)
    assert set(sums) == {path.name for path in tmp_path.iterdir()} == {SHARD, METADATA}
    assert all(sum_of(tmp_path / name) == wanted for name, wanted in sums.items())


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("plant", [pickle.dumps, lambda bomb: torch_saved({"x": bomb})])
def test_a_shard_with_code_in_it_runs_nothing(saved, plant, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (saved / SHARD).write_bytes(payload := plant(Bomb()))
    everything = [[], [], SHARD, 0, len(payload)]

    def point_to_it(found):
        found["model.b"]["chunks"] = [everything]
        found["model.a.weight"]["chunks"] = [[[0, 0], [4, 3], *everything[2:]]]
        for name in [name for name in found if name.startswith("optimizer")]:
            found[name]["chunks"] = [everything]

    rewritten(saved, point_to_it)
    with pytest.raises(CheckpointError, match="cannot be read"):
        dict(read_tensors(saved))
    with pytest.raises(CheckpointError):
        load({"optimizer": {"fused": False}}, saved)
    assert not (tmp_path / "exploded").exists()


def torch_saved(thing):
    import io

    torch.save(thing, buffer := io.BytesIO())
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("chunk", "complaint"),
    [
        ([[0, 0], [4, 3], "../../secret", 0, 1], "not the name of a shard"),
        ([[0, 0], [4, 3], "/etc/passwd", 0, 1], "not the name of a shard"),
        ([[0, 0], [4, 3], "__9_0.distcp", 0, 1], "is not there"),
        ([[0, 0], [4, 3], SHARD, 0, 10**9], "ends at byte 1000000000"),
        ([[0, 0], [4, 3], SHARD, -5, 10], "whole numbers"),
        ([[1, 0], [4, 3], SHARD, 0, 1], "does not lie in"),
        ([[0, 0], [2, 3], SHARD, 0, 1], "do not fill"),
        ([[0], [4], SHARD, 0, 1], "damaged"),
        ("nonsense", "damaged"),
    ],
)
def test_metadata_is_not_believed(saved, chunk, complaint):
    rewritten(saved, lambda found: found["model.a.weight"].update(chunks=[chunk]))
    with pytest.raises(CheckpointError, match=complaint):
        entries(saved)


def test_a_tensor_that_is_not_what_the_metadata_says_is_refused(saved):
    rewritten(saved, lambda found: found["model.a.weight"].update(dtype="float16"))
    with pytest.raises(CheckpointError, match=r"is torch\.float32 \(4, 3\), and the metadata says torch\.float16"):
        dict(read_tensors(saved))


def test_metadata_that_is_no_json_is_damaged(saved):
    (saved / METADATA).write_text((saved / METADATA).read_text()[:-10])
    with pytest.raises(CheckpointError, match=r"metadata\.json: is damaged"):
        entries(saved)


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_an_error_of_the_disk_names_the_path(tmp_path, monkeypatch, call):
    def fails(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match=r"No space left.*file"):
        write(tmp_path / "file", b"x")


def test_an_error_inside_torchs_serializer_names_cause_and_path(tmp_path, monkeypatch):
    monkeypatch.setattr(SummedFile, "write", out_of_space(SummedFile.write, after=3))
    with pytest.raises(CheckpointError, match=r"cannot be written by rank 0.*No space left on device.*__0_0.distcp"):
        save({"a": torch.randn(100)}, tmp_path)


def out_of_space(real, after):
    calls = 0

    def limited(self, data):
        nonlocal calls
        calls += 1
        if calls > after:
            self.error = OSError(errno.ENOSPC, "No space left on device", str(self.path))
            raise self.error
        return real(self, data)

    return limited


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    write(tmp_path / "file", b"old")

    def fails(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
