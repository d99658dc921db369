"""Settings of a run that starts from an adapter: those that are not given are the adapter's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from verl.config.adapter_files import read_adapter
from verl.config.load import LoadedConfig, load, load_sft
from verl.config.schema import Config

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]

KEY = "actor_rollout_ref.model.lora_adapter_path"
PEFT = "actor_rollout_ref.actor.peft"
MODULES = [f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_proj", "v_proj")]


def write(folder: Path, modules: list[str] = MODULES, **changes: Any) -> Path:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"base_model.model.{name}.lora_{factor}.weight": torch.zeros(shape)
        for name in modules
        for factor, shape in (("A", (4, 16)), ("B", (16, 4)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def loaded(*overrides: str) -> LoadedConfig[Config]:
    [result] = load(list(overrides), complete=False)
    return result


def test_settings_that_are_not_given_are_those_of_the_adapter(tmp_path: Path) -> None:
    result = loaded(f"{KEY}={write(tmp_path)}")
    peft = result.config.actor_rollout_ref.actor.peft
    assert (peft.lora_rank, peft.lora_alpha, peft.target_modules) == (4, 8, ["q_proj", "v_proj"])
    assert result.origins[f"{PEFT}.lora_rank"] == "adapter_config.json of the adapter"
    [supervised] = load_sft([f"model.lora_adapter_path={tmp_path}"], complete=False)
    assert supervised.config.model.peft.lora_rank == 4


def test_given_settings_are_not_replaced_by_those_of_the_adapter(tmp_path: Path) -> None:
    result = loaded(f"{KEY}={write(tmp_path)}", f"{PEFT}.lora_rank=16", f"{PEFT}.target_modules=all-linear")
    peft = result.config.actor_rollout_ref.actor.peft
    assert (peft.lora_rank, peft.lora_alpha, peft.target_modules) == (16, 8, "all-linear")
    assert f"{PEFT}.lora_alpha" in result.origins


@pytest.mark.parametrize(
    "changes", [{"target_modules": r".*\.q_proj"}, {"layers_to_transform": [1]}, {"exclude_modules": ["k_proj"]}]
)
def test_modules_that_suffixes_do_not_describe_are_named_in_full(tmp_path: Path, changes: dict[str, Any]) -> None:
    targets = read_adapter(write(tmp_path, MODULES[:1], **changes)).targets
    assert targets == ["layers.0.self_attn.q_proj"]


def test_an_adapter_that_cannot_be_read_changes_no_settings(tmp_path: Path) -> None:
    default = loaded().config.actor_rollout_ref.actor.peft
    assert loaded(f"{KEY}={tmp_path}/missing").config.actor_rollout_ref.actor.peft == default
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 8)
    assert loaded(f"{KEY}={tmp_path}").config.actor_rollout_ref.actor.peft == default


def test_an_adapter_of_another_model_is_mentioned(tmp_path: Path) -> None:
    path = write(tmp_path, base_model_name_or_path="Qwen/Qwen3-8B")
    same = loaded(f"{KEY}={path}", "actor_rollout_ref.model.path=/models/Qwen3-8B")
    assert not [hint for hint in same.hints if KEY in hint]
    other = loaded(f"{KEY}={path}", "actor_rollout_ref.model.path=Qwen/Qwen3-4B")
    assert "was trained on Qwen/Qwen3-8B, and the model here is Qwen/Qwen3-4B" in "\n".join(other.hints)
