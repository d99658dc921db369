"""Weights read in slices are those of transformers to the bit, and slices of all ranks fill every parameter once."""

from __future__ import annotations

import json
import logging
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, load_packed, save_family, tiny_qwen2
from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification

from verl.errors import EngineError
from verl.training.fsdp import model_loader
from verl.training.settings import LoraSettings
from verl.training.sharded_loading import StoredTensor, cut, cut_rows, find_files, find_sources

pytestmark = pytest.mark.unit


def save_qwen2(folder: Path, *, shards: str = "50GB", **changes: object) -> Path:
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2(**changes)).save_pretrained(folder, max_shard_size=shards)
    return folder


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of model.safetensors, or remove them; underscores in names stand for dots."""
    file = folder / "model.safetensors"
    weights = load_file(file) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, file, {"format": "pt"})


def load_whole(monkeypatch: pytest.MonkeyPatch, path: Path, **options: object) -> torch.nn.Module:
    """Load as `from_pretrained` does, without slices."""

    def refuse(*_: object, **__: object) -> None:
        raise model_loader.SlicingError("whole")

    with monkeypatch.context() as patch:
        patch.setattr(model_loader, "_open_in_slices", refuse)
        return load_packed(str(path), **options)


def load_in_slices(path: Path, **options: object) -> torch.nn.Module:
    """Load, and fail if the model was loaded whole."""

    model = load_packed(str(path), **options)
    assert not model.note
    return model


def assert_same(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        tensors, others = dict(getattr(model, kind)()), dict(getattr(expected, kind)())
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == others[name].dtype, name
            assert torch.equal(tensor, others[name]), name
            assert tensor.requires_grad == others[name].requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_in_slices_with_the_weights_and_buffers_of_from_pretrained(family, tmp_path, monkeypatch):
    path = Path(save_family(family, tmp_path))
    sliced = load_in_slices(path, dtype=torch.float32)
    assert_same(sliced, load_whole(monkeypatch, path, dtype=torch.float32))


def test_weights_are_rounded_as_from_pretrained_rounds_them(tmp_path, monkeypatch):
    path = save_qwen2(tmp_path)
    options = {"dtype": torch.bfloat16, "lora": LoraSettings(4)}
    assert_same(load_in_slices(path, **options), load_whole(monkeypatch, path, **options))


@pytest.mark.parametrize("head", [True, False], ids=["stored head", "new head"])
def test_a_critic_with_an_adapter_is_the_same(head, tmp_path, monkeypatch):
    torch.manual_seed(0)
    kind = Qwen2ForTokenClassification if head else Qwen2ForCausalLM
    kind(tiny_qwen2(num_labels=1, tie_word_embeddings=True)).save_pretrained(tmp_path)
    options = {"dtype": torch.float32, "head": "value", "lora": LoraSettings(2, seed=5)}
    model = load_in_slices(tmp_path, **options)
    assert_same(model, load_whole(monkeypatch, tmp_path, **options))
    assert bool(model.hf.score.weight.any()) == head


def test_several_files_and_tied_embeddings(tmp_path, monkeypatch):
    path = save_qwen2(tmp_path, shards="40KB", tie_word_embeddings=True)
    assert len(list(path.glob("*.safetensors"))) > 2
    model = load_in_slices(path, dtype=torch.float32)
    assert model.hf.lm_head.weight is model.hf.model.embed_tokens.weight
    assert_same(model, load_whole(monkeypatch, path, dtype=torch.float32))


@pytest.mark.parametrize("is_equal", [True, False])
def test_tied_weights_that_are_stored_twice_stay_tied_if_they_are_equal(is_equal, tmp_path, monkeypatch):
    path = save_qwen2(tmp_path, tie_word_embeddings=True)
    embeddings = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(path, lm_head__weight=embeddings.clone() if is_equal else embeddings + 1)
    model = load_packed(str(path), dtype=torch.float32)
    assert (model.hf.lm_head.weight is model.hf.model.embed_tokens.weight) == is_equal
    assert_same(model, load_whole(monkeypatch, path, dtype=torch.float32))


def test_only_the_head_of_tied_weights_may_be_stored(tmp_path, monkeypatch):
    path = save_qwen2(tmp_path, tie_word_embeddings=True)
    embeddings = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(path, lm_head__weight=embeddings, model__embed_tokens__weight=None)
    model = load_in_slices(path, dtype=torch.float32)
    assert torch.equal(model.hf.model.embed_tokens.weight, embeddings)


def test_a_model_that_lacks_a_weight_is_loaded_whole(tmp_path, monkeypatch):
    path = save_qwen2(tmp_path)
    edit_weights(path, model__norm__weight=None)
    assert torch.equal(load_packed(str(path), dtype=torch.float32).hf.model.norm.weight, torch.ones(64))


def test_a_model_without_safetensors_is_loaded_whole(tmp_path):
    path = save_qwen2(tmp_path)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    expected = load_file(path / "model.safetensors")["model.norm.weight"]
    (path / "model.safetensors").unlink()
    model = load_packed(str(path), dtype=torch.float32)
    assert torch.equal(model.hf.model.norm.weight, expected)
    assert "before it is sharded: it has no weights in safetensors format" in model.note


def test_weights_that_do_not_fit_the_configuration_are_named(tmp_path):
    path = save_qwen2(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(EngineError, match=r"mlp\.(gate|up)_proj\.weight has shape \(128, 64\).*needs \(96, 64\)"):
        load_packed(str(path), dtype=torch.float32)


def test_unused_tensors_of_a_checkpoint_are_named(tmp_path, caplog):
    path = save_qwen2(tmp_path)
    edit_weights(path, model__layers__7__extra=torch.ones(3))
    with caplog.at_level(logging.WARNING):
        load_packed(str(path), dtype=torch.float32)
    assert "1 tensors in its files are not used: model.layers.7.extra" in caplog.text


def test_a_truncated_file_is_named(tmp_path):
    path = save_qwen2(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(EngineError, match="cannot be loaded"):
        load_packed(str(path), dtype=torch.float32)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 64])
def test_slices_of_all_ranks_fill_the_stacked_experts_once(ranks, tmp_path):
    path = save_family("Qwen3-MoE", tmp_path, num_experts=6)
    stored = load_file(tmp_path / "model.safetensors")
    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(config)
    sources = find_sources(hf, find_files(path))
    whole = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert len(sources[name]) == 12
    for key, tensors in sources.items():
        shape, size = tuple(whole[key].shape), -(-whole[key].shape[0] // ranks)
        for rank in range(ranks):
            start, stop = (min(each * size, shape[0]) for each in (rank, rank + 1))
            local = torch.full((stop - start, *shape[1:]), math.nan)
            for part in cut_rows(tensors, shape, start, stop):
                view = local.as_strided(part.shape, part.source.strides, part.offset)
                assert view.isnan().all()
                view.copy_(stored[part.source.key][part.index])
            assert torch.equal(local, whole[key][start:stop]), key


def test_rows_of_a_transposed_tensor_are_its_columns():
    stored = StoredTensor("file", "key", shape=(6, 4), strides=(1, 6), offset=0)  # fills a parameter [4, 6]
    part = cut(stored, 6, 1, 3)
    assert part is not None
    assert (part.index, part.shape, part.offset) == ((slice(None), slice(1, 3)), (6, 2), 0)
    assert cut(stored, 6, 4, 9) is None


def test_slices_of_adjacent_rows_share_no_row():
    stored = StoredTensor("file", "key", shape=(10, 4), strides=(4, 1), offset=0)
    parts = [cut(stored, 4, *rows) for rows in pairwise((0, 3, 6, 9, 10))]
    assert [(part.index[0].start, part.index[0].stop) for part in parts] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert all(part.offset == 0 for part in parts)
