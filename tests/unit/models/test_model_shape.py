"""The number of parameters that follows from a model's configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from public_models import MODELS
from tiny import FAMILIES, tiny_family
from transformers import AutoModelForCausalLM

from verl.errors import ConfigError
from verl.models.model_folder import read_config, require_config
from verl.models.model_shape import ModelShape

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen2.5-0.5B", 0.494),
        ("Qwen2.5-7B", 7.616),
        ("Qwen2.5-14B", 14.770),
        ("Qwen2.5-32B", 32.764),
        ("Qwen2.5-72B", 72.706),
        ("Qwen3-30B-A3B", 30.532),
    ],
)
def test_public_models_have_their_published_sizes(name: str, billions: float) -> None:
    assert ModelShape.from_config(MODELS[name]).parameters == pytest.approx(billions * 1e9, rel=1e-3)


def test_an_moe_computes_a_token_with_few_of_its_parameters() -> None:
    shape = ModelShape.from_config(MODELS["Qwen3-30B-A3B"])
    assert shape.active_parameters == pytest.approx(3.04e9, rel=0.01)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_parameters_of_every_family_are_counted_to_within_a_tenth(family: str) -> None:
    config = tiny_family(family, vocab_size=1024, hidden_size=128, intermediate_size=256)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert ModelShape.from_config(config.to_dict()).parameters == pytest.approx(count, rel=0.1)


def test_a_critic_has_no_vocabulary_projection() -> None:
    policy = ModelShape.from_config(MODELS["Qwen2.5-7B"])
    critic = ModelShape.from_config(MODELS["Qwen2.5-7B"], has_value_head=True)
    assert policy.parameters - critic.parameters == 152064 * 3584


def test_a_configuration_without_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match="model: has no hidden_size, num_hidden_layers"):
        ModelShape.from_config({"vocab_size": 8, "num_attention_heads": 2}, "model")


def test_a_configuration_is_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert read_config(str(tmp_path)) == read_config(str(tmp_path / "config.json")) == {"model_type": "qwen2"}
    assert require_config(str(tmp_path)) == read_config(str(tmp_path))
    assert read_config("org/model-that-is-not-here") == {}
    with pytest.raises(ConfigError, match="is not on this machine; download it"):
        require_config("org/model-that-is-not-here")
    for text, message in (("[]", "is not a JSON object"), ("{", "cannot be read as JSON"), ("[" * 100_000, "JSON")):
        (tmp_path / "config.json").write_text(text)
        assert read_config(str(tmp_path)) == {}
        with pytest.raises(ConfigError, match=message):
            require_config(str(tmp_path))


def test_the_largest_shard_has_whole_rows_and_whole_experts() -> None:
    dense = ModelShape(vocabulary=1024, width=256, mlp=512, layers=2, heads=4, kv_heads=4, head_width=64)
    assert dense.count_largest_shard(1) == dense.parameters
    assert dense.count_largest_shard(8) == dense.parameters // 8
    experts = replace(dense, experts=8)
    assert experts.count_largest_shard(8) == experts.parameters // 8
    one_expert = 3 * experts.width * experts.mlp
    assert experts.count_largest_shard(256) > experts.layers * one_expert  # although 1/256 is less
