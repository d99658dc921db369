"""Checks of an adapter to start from: all problems are reported at once, before any process starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_peft_adapter, tiny_qwen2
from transformers import Qwen2ForCausalLM

from verl.commands.models.generate import read_arguments
from verl.config.load import load, load_sft
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.sft.builder import rank_settings
from verl.sft.data import check_sft_files
from verl.trainer.build.adapter_checks import find_adapter_problems
from verl.trainer.build.preflight import check_files
from verl.trainer.build.worker_settings import train_settings

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

KEY = "actor_rollout_ref.model.lora_adapter_path"
PEFT = "actor_rollout_ref.actor.peft"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2()).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    save_peft_adapter(model, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    return tmp_path / "adapter"


def config_of(model: Path, adapter: Path, *overrides: str) -> Config:
    paths = f"actor_rollout_ref.model.path={model}", f"{KEY}={adapter}", "actor_rollout_ref.rollout.n=4"
    [loaded] = load([*paths, *overrides], complete=False)
    return loaded.config


def problems_of(model: Path, adapter: Path, *overrides: str) -> list[str]:
    return list(find_adapter_problems(config_of(model, adapter, *overrides)))


def change(adapter: Path, **changes: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_saved_adapter_fits_and_reaches_the_workers(model: Path, adapter: Path) -> None:
    config = config_of(model, adapter)
    assert list(find_adapter_problems(config)) == []
    lora = train_settings(config, 10, "cpu").actor.lora
    assert lora is not None
    assert (lora.path, lora.rank, lora.alpha, lora.targets) == (str(adapter), 4, 8, ("q_proj", "v_proj"))


@pytest.mark.parametrize("targets", ["[q_proj,v_proj]", "'layers\\.\\d\\.self_attn\\.[qv]_proj'"])
def test_settings_that_mean_the_same_are_fine(model: Path, adapter: Path, targets: str) -> None:
    assert problems_of(model, adapter, f"{PEFT}.lora_rank=4", f"{PEFT}.target_modules={targets}") == []


def test_an_adapter_of_all_linear_modules_fits_that_setting(model: Path, tmp_path: Path) -> None:
    save_peft_adapter(model, tmp_path, target_modules="all-linear")
    assert problems_of(model, tmp_path, f"{PEFT}.target_modules=all-linear") == []
    targets = config_of(model, tmp_path).actor_rollout_ref.actor.peft.target_modules
    assert targets == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def test_all_differences_are_reported_together_each_with_its_fix(model: Path, adapter: Path) -> None:
    given = {"lora_rank": "16", "lora_alpha": "32", "target_modules": "[q_proj,k_proj]"}
    peft = (f"{PEFT}.{name}={value}" for name, value in given.items())
    config = config_of(model, adapter, *peft, "data.train_files=missing.parquet")
    with pytest.raises(ConfigError) as raised:
        check_files(config)
    rank, alpha, targets = [problem for problem in raised.value.problems if PEFT in problem]
    assert f"{PEFT}.lora_rank: is 16" in rank
    assert f"set {PEFT}.lora_rank=4, or remove the setting" in rank
    assert f"set {PEFT}.lora_alpha=8, or remove the setting" in alpha
    assert f"set {PEFT}.target_modules=[q_proj,v_proj], or remove the setting" in targets
    assert any("data.train_files" in problem for problem in raised.value.problems), "with all other problems"


@pytest.mark.parametrize(
    "targets", ["all-linear", "[q_proj]", "[q_proj,v_proj,o_proj]", "'layers.0.*proj'", "[layers.0.self_attn.q_proj]"]
)
def test_other_target_modules_are_refused(model: Path, adapter: Path, targets: str) -> None:
    [problem] = problems_of(model, adapter, f"{PEFT}.target_modules={targets}")
    assert f"set {PEFT}.target_modules=[q_proj,v_proj]" in problem


def test_an_adapter_of_some_layers_is_not_one_of_all(model: Path, tmp_path: Path) -> None:
    save_peft_adapter(model, tmp_path, target_modules=["q_proj"], layers_to_transform=[1])
    assert problems_of(model, tmp_path) == []
    [problem] = problems_of(model, tmp_path, f"{PEFT}.target_modules=[q_proj]")
    assert f"set {PEFT}.target_modules=[layers.1.self_attn.q_proj]" in problem


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "IA3"}, "is of type IA3"),
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias=all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"lora_alpha": 2.5}, "lora_alpha=2.5"),
    ],
)
def test_kinds_of_adapters_that_cannot_be_trained_are_named(
    model: Path, adapter: Path, changes: dict[str, Any], says: str
) -> None:
    change(adapter, **changes)
    [problem] = problems_of(model, adapter)
    assert says in problem
    assert "merge_and_unload" in problem


def test_an_adapter_of_the_head_is_named(model: Path, adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    head = {f"base_model.model.lm_head.lora_{factor}.weight": torch.zeros(4, 4) for factor in "AB"}
    save_file(tensors | head, adapter / "adapter_model.safetensors")
    [problem] = problems_of(model, adapter)
    assert "adapts modules outside the layers (lm_head)" in problem


def test_an_adapter_of_another_model_is_refused(model: Path, adapter: Path, tmp_path: Path) -> None:
    Qwen2ForCausalLM(tiny_qwen2(hidden_size=32)).save_pretrained(tmp_path / "smaller")
    [problem] = problems_of(tmp_path / "smaller", adapter)
    assert "belongs to another model" in problem
    assert f"set the path of the model to {model}" in problem


def test_tensors_that_contradict_the_configuration_are_refused(model: Path, adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in tensors if ".lora_A." in name)
    save_file(tensors | {name: tensors[name][:2].contiguous()}, adapter / "adapter_model.safetensors")
    [problem] = problems_of(model, adapter)
    assert "are not those of a LoRA adapter of rank 4" in problem


def test_missing_and_broken_files_are_named(model: Path, adapter: Path) -> None:
    [problem] = problems_of(model, adapter.with_name("adaptor"))
    assert f"there is no such directory; {adapter.parent} contains: adapter/; set {KEY}={adapter}" in problem
    [problem] = problems_of(model, model)
    assert "has no adapter_config.json" in problem
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    [problem] = problems_of(model, adapter)
    assert "has no adapter_model.safetensors" in problem
    assert "safe_serialization=True" in problem
    (adapter / "adapter_model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0")
    [problem] = problems_of(model, adapter)
    assert "is not a complete safetensors file" in problem
    (adapter / "adapter_config.json").write_text("{")
    [problem] = problems_of(model, adapter)
    assert "is not valid JSON" in problem


def test_supervised_runs_start_from_an_adapter_too(model: Path, adapter: Path) -> None:
    settings = [f"model.path={model}", f"model.lora_adapter_path={adapter}", "data.train_files=missing.parquet"]
    [loaded] = load_sft(settings, complete=False)
    lora = rank_settings(loaded.config, 10, "cpu").actor.lora
    assert lora is not None
    assert (lora.path, lora.rank) == (str(adapter), 4)
    [wrong] = load_sft([*settings, "model.peft.lora_alpha=99"], complete=False)
    with pytest.raises(ConfigError, match=r"set model\.peft\.lora_alpha=8, or remove the setting"):
        check_sft_files(wrong.config)


def test_generation_does_not_silently_ignore_the_adapter(model: Path, adapter: Path) -> None:
    with pytest.raises(ConfigError, match="`verl generate` loads whole models"):
        read_arguments(["test.parquet", f"actor_rollout_ref.model.path={model}", f"{KEY}={adapter}"])
