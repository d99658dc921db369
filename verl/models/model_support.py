"""Which models can be trained, by their config.json, before anything is loaded.

The rest is checked later: packed sequences are compared with the model's own forward pass when it is loaded
(`verl.training.fsdp.model_loader`), and every rollout engine with the trainer (`verl.weights.sync`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from verl.models.model_folder import count_experts, is_moe, read_config, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

making_model = threading.Lock()
"""Held while transformers makes a model: meanwhile the default data type of all threads is that of the model."""

LAYER_TYPES = {"full_attention", "sliding_attention"}
VERIFIED = {
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "llama": "Llama",
    "mistral": "Mistral",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "phi3": "Phi 3",
    "qwen3_moe": "Qwen3-MoE",
}
"""`model_type` -> name of the families that `make show-families` trains, syncs to vLLM, saves, resumes and merges."""

STATEFUL = {
    "bamba",
    "falcon_mamba",
    "jamba",
    "mamba",
    "mamba2",
    "nemotron_h",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "zamba",
}
MODALITIES = ("vision_config", "audio_config")
MODEL_ATTENTION = "eager"
"""The model's own attention code; transformers' sdpa silently ignores soft caps."""


def attention_for(config: PreTrainedConfig) -> str | None:
    """Return the attention to load a model with, so that soft caps are applied; None for transformers' choice."""
    return MODEL_ATTENTION if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None else None


def family_problems(path: str) -> Iterator[str]:
    """Yield the reasons why the model in the folder `path` cannot be trained; none if it is not a folder."""
    config = read_config(path)
    kind, text = config.get("model_type", "no model_type"), text_config(config)
    unsupported = {str(layer_type) for layer_type in text.get("layer_types") or ()} - LAYER_TYPES
    if config.get("is_encoder_decoder"):
        yield f"{path} ({kind}): encoder-decoder models are not supported; use a causal language model"
    if text.get("model_type") in STATEFUL or unsupported:
        layers = ", ".join(sorted(unsupported)) or "recurrent state"
        yield (
            f"{path} ({kind}): layers with {layers} cannot be trained on packed sequences; supported are "
            f"{', '.join(sorted(LAYER_TYPES))}"
        )
    for part in MODALITIES:
        if config.get(part):
            yield f"{path} ({kind}): multimodal models ({part}) are not supported; use a text model"
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        yield f"{path} ({kind}): quantized weights ({method}) cannot be trained; use the original model"


def heads_problem(path: str, size: int) -> str | None:
    """Return why `size` ranks cannot share the attention heads of the model in the folder `path`; None if they can."""
    config = read_config(path)
    heads = text_config(config).get("num_attention_heads")
    if not isinstance(heads, int) or heads % size == 0:
        return None
    return f"{path} has {heads} attention heads, which {size} ranks cannot share; set it to {math.gcd(heads, size)}"


def expert_problem(path: str, ranks: int = 1) -> str | None:
    """Return why expert parallelism over `ranks` is not possible with the model in the folder `path`; None if it is."""
    config = read_config(path)
    experts = count_experts(config)
    if not config or (experts and experts % ranks == 0):
        return None
    if experts:
        return f"{path} has {experts} experts, which {ranks} ranks cannot share evenly"
    return f"{path} ({config.get('model_type', 'no model_type')}) is not an MoE"


def is_dense_and_verified(path: str) -> bool:
    """Return whether the model in the folder `path` is of a verified family and not an MoE."""
    return read_config(path).get("model_type") in VERIFIED and not is_moe(path)


def family_note(path: str, model_type: str, *, published: bool = True) -> str | None:
    """Return a note if the family of a model is not verified, else None."""
    if model_type in VERIFIED:
        return None
    probe = " and the rollout engines' with the trainer's after every weight sync" if published else ""
    return (
        f"{path}: {model_type} is not one of the verified families ({', '.join(VERIFIED.values())}). Its log-probs on "
        f"packed sequences are compared with those on single sequences at load{probe}; the run stops if they differ"
    )


def packing_length_problem(path: str, config: Mapping[str, Any], longest: int, settings: str) -> str | None:
    """Return why sequences of `longest` tokens, which the `settings` allow, cannot be packed; None if they can.

    Some rotary embeddings change for a whole row as soon as one sequence in it exceeds the original length of the
    model: the result of a sequence would depend on its neighbors.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    if kind not in ("longrope", "dynamic"):
        return None
    limit = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    limit = int(limit or config["max_position_embeddings"])
    if longest <= limit:
        return None
    return (
        f"{settings}: sequences may have {longest} tokens, but beyond {limit} the {kind} positions of {path} change "
        f"for all sequences packed together; set {settings} to at most {limit}"
    )
