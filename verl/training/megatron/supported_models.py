"""Which models Megatron-Core can train with which layout. Imports no torch, because `verl plan` asks, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.models.model_folder import count_experts
from verl.training.megatron.settings import MegatronSettings

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Values of `model_type` whose layers are known to be the same in Megatron-Core and in transformers."""
ROPE_TYPES = ("default", "linear", "llama3")
"""Kinds of rotary embeddings that are a fixed frequency per dimension."""


def find_problem(config: Mapping[str, Any], settings: MegatronSettings) -> str:
    """Return why a model cannot be trained, or would give other results than in transformers; empty if it can be.

    Args:
        config: The content of the model's config.json, also with all defaults of transformers.
        settings: The layout.
    """
    kind = config.get("model_type")
    where = f"model {settings.model_path} ({kind})"
    if kind not in FAMILIES:
        return f"{where}: strategy=megatron supports {', '.join(FAMILIES)}; use actor_rollout_ref.actor.strategy=fsdp2"
    types = set(config.get("layer_types") or ()) - {"full_attention"}
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    odd = {
        "attention_bias": config.get("attention_bias"),
        "mlp_bias": config.get("mlp_bias"),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "layer_types": types,
        "use_sliding_window": config.get("use_sliding_window"),
        "mlp_only_layers": config.get("mlp_only_layers"),
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "rope_parameters": rotary.get("rope_type", rotary.get("type", "default")) not in ROPE_TYPES
        or rotary.get("partial_rotary_factor", 1.0) != 1.0,
        "quantization_config": config.get("quantization_config"),
    }
    if wrong := [name for name, is_odd in odd.items() if is_odd]:
        values = ", ".join(f"{name}={config.get(name)}" for name in wrong)
        return f"{where}: strategy=megatron does not support {values}; use strategy=fsdp2"
    return _find_layout_problem(config, settings, where)


def _find_layout_problem(config: Mapping[str, Any], settings: MegatronSettings, where: str) -> str:
    tensor, pipeline = settings.tensor_parallel_size, settings.pipeline_parallel_size
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    for name, size, what, count in (
        ("tensor", tensor, "num_key_value_heads", config.get("num_key_value_heads") or heads),
        ("tensor", tensor, "intermediate_size", config["intermediate_size"]),
        ("expert", settings.expert_parallel_size, "num_experts", count_experts(config) or 1),
    ):
        if count % size:
            return f"{where}: megatron.{name}_model_parallel_size={size} does not divide {what}={count}"
    if heads % (tensor * settings.context_parallel_size):
        return (
            f"{where}: megatron.tensor_model_parallel_size={tensor} x context_parallel_size="
            f"{settings.context_parallel_size} does not divide num_attention_heads={heads}"
        )
    given = [each for each in (settings.first_stage_layers, settings.last_stage_layers) if each is not None]
    left, stages = layers - sum(given), pipeline - len(given)
    if (given and pipeline == 1) or left < 0 or (left % stages if stages else left):
        return (
            f"{where}: {layers} layers cannot be split over {pipeline} pipeline stages; set "
            "megatron.pipeline_model_parallel_size, or the layers of the first and last stage in "
            "megatron.override_transformer_config.num_layers_in_{first,last}_pipeline_stage"
        )
    return ""
