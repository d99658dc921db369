import errno
import io
import json
import math
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file

from verl.checkpoint.files import compute_checksum, write
from verl.checkpoint.save import load, save
from verl.checkpoint.shards import DTYPES, METADATA, read_index, read_tensors, read_values
from verl.errors import CheckpointError

pytestmark = pytest.mark.unit

SHARD = "shard-00001-of-00001.safetensors"


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
    change(written["tensors"])
    (directory / METADATA).write_text(json.dumps(written))


def test_one_process_reads_whole_tensors_without_a_model(saved):
    stored = dict(read_tensors(saved, prefix="model."))
    assert list(stored) == ["a.weight", "b"]
    assert stored["a.weight"].equal(torch.arange(12.0).reshape(4, 3))
    assert stored["b"].equal(torch.tensor(7))


def test_plain_values_are_json(saved):
    state = {"optimizer": {"betas": (0.0, 0.0), "fused": False, "foreach": True}}
    assert load(state, saved)["optimizer"] == {"betas": [0.9, 0.999], "fused": True, "foreach": None}


def test_values_that_json_cannot_store_are_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"extra\.thing: .* cannot be stored"):
        save({"extra": {"thing": object()}}, tmp_path)


def test_checksums_are_those_of_the_files(tmp_path):
    sums = save({"a": torch.randn(5)}, tmp_path)
    assert set(sums) == {path.name for path in tmp_path.iterdir()} == {SHARD, METADATA}
    assert all(compute_checksum(tmp_path / name) == wanted for name, wanted in sums.items())


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def torch_saved(thing):
    torch.save(thing, buffer := io.BytesIO())
    return buffer.getvalue()


@pytest.mark.parametrize("plant", [pickle.dumps, torch_saved])
def test_a_shard_with_code_in_it_runs_nothing(saved, plant, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    payload = plant(Bomb())
    (saved / SHARD).write_bytes(payload.ljust((saved / SHARD).stat().st_size))
    with pytest.raises(CheckpointError, match=rf"{SHARD}: model\.a\.weight cannot be read"):
        dict(read_tensors(saved))
    with pytest.raises(CheckpointError, match=rf"{SHARD}: model\.b cannot be read"):
        load({"model": {"b": torch.tensor(0)}}, saved)
    (saved / METADATA).write_bytes(payload)
    with pytest.raises(CheckpointError, match=r"metadata\.json: is damaged"):
        read_values(saved)
    assert not (tmp_path / "exploded").exists()


def test_bytes_of_code_inside_a_tensor_are_numbers(saved, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    payload, shard = pickle.dumps(Bomb())[:48].ljust(48), saved / SHARD
    shard.write_bytes(shard.read_bytes()[:-48] + payload)
    assert dict(read_tensors(saved))["model.a.weight"].numpy().tobytes() == payload
    assert not (tmp_path / "exploded").exists()


def test_shards_can_be_opened_with_safetensors(saved):
    tensors = load_file(saved / SHARD)
    assert sorted(tensors) == ["model.a.weight", "model.b"]
    assert tensors["model.a.weight"].equal(torch.arange(12.0).reshape(4, 3))


def test_a_shard_is_what_safetensors_itself_would_accept_of_mixed_types(tmp_path):
    state = {str(dtype): torch.ones(3, dtype=dtype) for dtype in DTYPES}
    save({"x": state}, tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / SHARD).values()} == set(DTYPES)


def test_a_type_that_safetensors_lacks_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"x: torch\.complex128 cannot be stored"):
        save({"x": torch.ones(2, dtype=torch.complex128)}, tmp_path)


def test_a_checkpoint_of_an_older_format_is_refused_with_a_fix(saved):
    (saved / METADATA).write_text(json.dumps({"format": 2, "entries": {}}))
    with pytest.raises(CheckpointError, match=r"has format 2, and this version of verl reads format 3.*verl merge"):
        load({"model": {"b": torch.tensor(0)}}, saved)


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ([[0, 0], [4, 3], "../../secret"], "not the name of a shard"),
        ([[0, 0], [4, 3], "/etc/passwd"], "not the name of a shard"),
        ([[0, 0], [4, 3], -5], "not the name of a shard"),
        ([[-1, 0], [4, 3], SHARD], "whole numbers"),
        ([[1, 0], [4, 3], SHARD], "is not inside"),
        ([[0, 0], [2, 3], SHARD], "do not fill"),
        ([[0], [4], SHARD], "damaged"),
    ],
)
def test_metadata_is_validated(saved, part, complaint):
    changed = dict(zip(("offsets", "sizes", "file"), part, strict=True))
    rewritten(saved, lambda stored: stored["model.a.weight"].update(parts=[changed]))
    with pytest.raises(CheckpointError, match=complaint):
        read_index(saved)


@pytest.mark.parametrize("parts", ["nonsense", [5], [{}], None])
def test_metadata_with_invalid_values_is_damaged(saved, parts):
    rewritten(saved, lambda stored: stored["model.a.weight"].update(parts=parts))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_index(saved)


def test_a_shard_that_is_missing_is_named(saved):
    missing = "shard-00009-of-00009.safetensors"
    rewritten(saved, lambda stored: stored["model.a.weight"]["parts"][0].update(file=missing))
    with pytest.raises(CheckpointError, match=rf"{missing}: model\.a\.weight cannot be read"):
        dict(read_tensors(saved))


@pytest.mark.parametrize("cut", [1, 48, 200])
def test_a_truncated_shard_is_named(saved, cut):
    (saved / SHARD).write_bytes((saved / SHARD).read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=rf"{SHARD}: model\.a\.weight cannot be read"):
        dict(read_tensors(saved))


def test_a_tensor_that_is_not_what_the_metadata_says_is_refused(saved):
    rewritten(saved, lambda stored: stored["model.a.weight"].update(dtype="float16"))
    with pytest.raises(CheckpointError, match=r"a\.weight is torch\.float32 .*metadata\.json has torch\.float16"):
        dict(read_tensors(saved))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 2)])
def test_any_type_and_shape_comes_back(tmp_path, dtype, shape):
    whole = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    save(
        {"first": torch.ones(3, dtype=torch.uint8), "x": whole, "turned": whole.t() if len(shape) == 2 else whole},
        tmp_path,
    )
    stored = dict(read_tensors(tmp_path))
    assert stored["x"].dtype == dtype
    assert stored["x"].equal(whole)
    assert stored["turned"].equal(whole.t() if len(shape) == 2 else whole)


def test_parts_that_overlap_are_refused(saved):
    halves = [{"offsets": [row, 0], "sizes": [2, 3], "file": SHARD} for row in (0, 1)]
    rewritten(saved, lambda stored: stored["model.a.weight"].update(parts=halves))
    with pytest.raises(CheckpointError, match="do not fill"):
        read_index(saved)


@pytest.mark.parametrize("shape", [[10**30, 0], [2**62, 2**62, 0]])
def test_an_impossible_shape_is_damage(saved, shape):
    rewritten(saved, lambda stored: stored["model.a.weight"].update(shape=shape, parts=[]))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_index(saved)


def test_a_single_element_is_saved_whatever_its_stride(tmp_path):
    save({"x": torch.arange(7.0)[None, ::7]}, tmp_path)
    assert dict(read_tensors(tmp_path))["x"].tolist() == [[0.0]]


def test_tensors_are_read_into_host_memory_whatever_the_default_device(saved):
    with torch.device("meta"):
        assert dict(read_tensors(saved, prefix="model."))["b"].tolist() == 7


def test_metadata_that_is_not_json_is_damaged(saved):
    (saved / METADATA).write_text((saved / METADATA).read_text()[:-10])
    with pytest.raises(CheckpointError, match=r"metadata\.json: is damaged"):
        read_index(saved)


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_an_error_of_the_disk_names_the_path(tmp_path, monkeypatch, call):
    def fails(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match=r"No space left.*file"):
        write(tmp_path / "file", b"x")


def test_an_error_of_the_disk_in_a_shard_names_cause_and_path(tmp_path, monkeypatch):
    def fails(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fails)
    with pytest.raises(CheckpointError, match=r"cannot be written by rank 0.*No space left on device.*shard-00001"):
        save({"a": torch.randn(100)}, tmp_path)


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    write(tmp_path / "file", b"old")

    def fails(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
