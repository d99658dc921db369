"""Weights by the names of a checkpoint find their way back into a model, one by one."""

from pathlib import Path

import pytest
import torch
from tiny import FAMILIES, save_family
from transformers import AutoModelForCausalLM

from verl.weights.bucket import load_hf, to_hf

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("family", FAMILIES)
def test_all_weights_of_a_checkpoint_are_written_to_the_model(tmp_path: Path, family: str) -> None:
    source = AutoModelForCausalLM.from_pretrained(save_family(family, tmp_path), dtype=torch.float32)
    torch.manual_seed(1)
    target = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32)
    load_hf(target, to_hf(source, source.named_parameters()))
    for (name, expected), actual in zip(source.named_parameters(), target.parameters(), strict=True):
        assert torch.equal(actual, expected), name


def test_each_weight_is_written_by_itself(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_family("Qwen3-MoE", tmp_path), dtype=torch.float32)
    before = dict(to_hf(model, ((name, each.detach().clone()) for name, each in model.named_parameters())))
    key = "model.layers.1.mlp.experts.2.up_proj.weight"
    load_hf(model, [(key, torch.full_like(before[key], 7.0))])
    for name, now in to_hf(model, model.named_parameters()):
        assert torch.equal(now, torch.full_like(now, 7.0) if name == key else before[name]), name
