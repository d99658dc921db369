"""Unsupported models are reported from their configuration, together with all other problems."""

import json

import pytest
from tiny import FAMILIES, tiny_family

from verl.config.load import load_dict
from verl.errors import ConfigError
from verl.models.model_support import (
    VERIFIED,
    expert_problem,
    family_note,
    family_problems,
    heads_problem,
    packing_length_problem,
)
from verl.trainer.build.preflight import check_files

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", FAMILIES)
def test_the_families_of_the_table_are_verified_and_have_no_problems(tmp_path, name):
    config = tiny_family(name)
    config.save_pretrained(tmp_path)
    assert [*family_problems(str(tmp_path))] == []
    assert config.model_type in VERIFIED
    assert family_note("model", config.model_type) is None


ODD = {
    "an encoder": ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
    "a state": ({"model_type": "mamba2"}, "layers with recurrent state cannot be trained on packed"),
    "linear attention": (
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
        "layers with linear_attention cannot be trained on packed sequences; supported are full_attention, sliding",
    ),
    "inside of another": (
        {"model_type": "qwen3_5", "text_config": {"layer_types": ["linear_attention"]}},
        "layers with linear_attention",
    ),
    "images": ({"model_type": "gemma3", "vision_config": {"hidden_size": 8}}, "multimodal models (vision_config)"),
    "quantized": (
        {"model_type": "qwen2", "quantization_config": {"quant_method": "awq"}},
        "quantized weights (awq) cannot be trained; use the original model",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_trained_is_named_with_the_fix(tmp_path, name):
    config, expected = ODD[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    [problem] = family_problems(str(tmp_path))
    assert expected in problem
    assert config["model_type"] in problem


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_an_unreadable_configuration_is_left_to_the_loader(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert [*family_problems(str(tmp_path))] == []
    assert [*family_problems("Qwen/Qwen2.5-0.5B")] == []


def test_a_run_reports_all_problems_together_before_anything_starts(tmp_path):
    for name in ("an encoder", "images"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(ODD[name][0]))
    given = {
        "actor_rollout_ref.model.path": str(tmp_path / "an encoder"),
        "critic.model.path": str(tmp_path / "images"),
        "algorithm.adv_estimator": "gae",
        "data.train_files": str(tmp_path / "none.parquet"),
    }
    tree = {}
    for key, value in given.items():
        *above, last = key.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    with pytest.raises(ConfigError) as raised:
        check_files(load_dict(tree).config)
    text = str(raised.value)
    assert "actor_rollout_ref.model.path" in text
    assert "critic.model.path" in text
    assert "encoder-decoder" in text
    assert "vision_config" in text


def test_an_unverified_family_is_tried_with_a_note():
    note = family_note("my/model", "cohere")
    assert note is not None
    assert "cohere is not one of the verified families" in note
    assert "the run stops if they differ" in note


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_sequences_whose_positions_would_depend_on_their_neighbors_are_refused(rope_type):
    rope = {"rope_type": rope_type, "original_max_position_embeddings": 4096}
    for config in ({"rope_parameters": rope}, {"rope_scaling": {"type": rope_type}, "max_position_embeddings": 4096}):
        assert packing_length_problem("phi", config, 4096, "data.max_length") is None
        problem = packing_length_problem("phi", config, 4097, "data.max_length")
        assert problem is not None
        assert "set data.max_length to at most 4096" in problem


@pytest.mark.parametrize("rope", [{}, {"rope_type": "llama3", "original_max_position_embeddings": 16}])
def test_other_positions_do_not_depend_on_neighbors(rope):
    assert packing_length_problem("m", {"rope_parameters": rope, "max_position_embeddings": 64}, 10**6, "x") is None


def test_a_dense_model_has_no_routing_to_control(tmp_path):
    tiny_family("Qwen3").save_pretrained(tmp_path / "dense")
    tiny_family("Qwen3-MoE").save_pretrained(tmp_path / "moe")
    assert expert_problem(str(tmp_path / "dense")) == f"{tmp_path / 'dense'} (qwen3) is not an MoE"
    assert expert_problem(str(tmp_path / "moe")) is None
    assert expert_problem("my-org/on-the-hub") is None


def test_experts_are_distributed_evenly_or_not_at_all(tmp_path):
    tiny_family("Qwen3-MoE").save_pretrained(tmp_path)  # 4 experts
    assert expert_problem(str(tmp_path), 4) is None
    assert expert_problem(str(tmp_path), 3) == f"{tmp_path} has 4 experts, which 3 ranks cannot share evenly"


def test_ranks_that_cannot_share_the_heads_of_a_model_are_refused_by_the_nearest_size(tmp_path):
    tiny_family("Qwen3").save_pretrained(tmp_path)  # 2 attention heads
    assert heads_problem(str(tmp_path), 2) is None
    assert heads_problem(str(tmp_path), 4).endswith("2 attention heads, which 4 ranks cannot share; set it to 2")
    assert heads_problem("my-org/on-the-hub", 4) is None


def test_routing_settings_are_refused_for_a_dense_model_by_name(tmp_path):
    tiny_family("Qwen3").save_pretrained(tmp_path)
    (tmp_path / "train.parquet").touch()
    actor = {"router_replay": {"mode": "R3"}, "router_aux_loss_coef": 0.01}
    tree = {
        "actor_rollout_ref": {"model": {"path": str(tmp_path)}, "actor": actor},
        "data": {"train_files": str(tmp_path / "train.parquet")},
    }
    with pytest.raises(ConfigError) as raised:
        check_files(load_dict(tree).config)
    text = str(raised.value)
    assert f"{tmp_path} (qwen3) is not an MoE" in text
    assert "set actor_rollout_ref.actor.router_replay.mode=disabled" in text
    assert "set actor_rollout_ref.actor.router_aux_loss_coef=0" in text
