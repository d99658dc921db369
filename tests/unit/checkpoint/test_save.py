import pytest
import torch

from verl.checkpoint.save import load, save
from verl.errors import CheckpointError
from verl.types import LocalShard

pytestmark = pytest.mark.unit


def state(fill, rank="0", size=3):
    return {
        "model": {"a.weight": torch.full((size, 2), fill)},
        "schedule": {"step": int(fill)},
        "rng": {rank: {"cpu": torch.full((4,), int(fill), dtype=torch.uint8)}},
    }


def test_a_saved_state_is_loaded_unchanged(tmp_path):
    save(state(7.0), tmp_path / "actor")
    loaded = load(state(0.0), tmp_path / "actor")
    assert loaded["model"]["a.weight"].eq(7.0).all()
    assert loaded["schedule"]["step"] == 7
    assert loaded["rng"]["0"]["cpu"].eq(7).all()


def test_a_rank_that_did_not_exist_gets_no_random_state(tmp_path):
    save(state(7.0), tmp_path)
    loaded = load(state(0.0, rank="5"), tmp_path)
    assert "rng" not in loaded
    assert loaded["model"]["a.weight"].eq(7.0).all()


def test_another_shape_is_refused_by_name(tmp_path):
    save(state(7.0), tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.a\.weight has shape \(3, 2\) in it, \(4, 2\) is needed"):
        load(state(0.0, size=4), tmp_path)


def test_a_missing_entry_is_refused_by_name(tmp_path):
    save(state(7.0), tmp_path)
    wanted = state(0.0)
    wanted["model"]["b.weight"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"model\.b\.weight is not in it"):
        load(wanted, tmp_path)


def test_a_part_that_was_not_saved_is_named_with_the_setting(tmp_path):
    save(state(7.0), tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer was not saved in it .*checkpoint\.load_contents"):
        load({**state(0.0), "optimizer": {"step": torch.zeros(1)}}, tmp_path)


def test_a_model_that_was_not_saved_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"critic: does not exist; the run that saved had no critic"):
        load(state(0.0), tmp_path / "critic")


def test_a_directory_without_metadata_is_an_unfinished_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="the save did not finish"):
        load(state(0.0), tmp_path)


def test_adapters_and_full_weights_are_not_confused(tmp_path):
    whole, adapter = {"model": {"w": torch.zeros(2)}}, {"model": {"w.lora_A.default.weight": torch.zeros(2)}}
    adapter["base"] = {"fingerprint": "f", "adapter": "{}"}
    save(whole, tmp_path / "whole")
    save(adapter, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"holds all weights and no adapter; set peft\.lora_rank=0"):
        load(adapter, tmp_path / "whole")
    with pytest.raises(CheckpointError, match=r"holds an adapter; set peft\.lora_rank as it was"):
        load(whole, tmp_path / "adapter")
    assert load(adapter, tmp_path / "adapter")["base"]["fingerprint"] == "f"


def test_a_shard_is_filled_from_its_place_in_the_whole(tmp_path):
    whole = torch.arange(12.0).view(4, 3)
    save({"model": {"weight": LocalShard(whole, (0, 0), (4, 3), whole.dtype)}}, tmp_path)
    corner = LocalShard(torch.zeros(2, 2), (1, 1), (4, 3), torch.float32)
    nothing = LocalShard(None, (0, 0), (4, 3), torch.float32)
    assert load({"model": {"weight": corner}}, tmp_path)["model"]["weight"] is corner
    assert torch.equal(corner.tensor, whole[1:3, 1:3])
    assert load({"model": {"weight": nothing}}, tmp_path)["model"]["weight"] is nothing


def test_a_shard_of_another_shape_is_refused_by_name(tmp_path):
    save({"model": {"weight": torch.zeros(4, 3)}}, tmp_path)
    wanted = LocalShard(torch.zeros(2, 3), (0, 0), (2, 3), torch.float32)
    with pytest.raises(CheckpointError, match=r"model.weight has shape \(4, 3\) in it, \(2, 3\) is needed"):
        load({"model": {"weight": wanted}}, tmp_path)
