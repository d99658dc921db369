"""Model families: which models can be trained, judged by their configuration before loading. Imports no torch.

The rest is checked later: packed sequences are compared with the model's own forward pass when it is loaded
(`verl.training.fsdp.model_loader`), and every rollout engine with the trainer (`verl.weights.sync`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
MODALITIES = ("vision_config", "audio_config")


def family_problems(path: str) -> Iterator[str]:
    """Yield the reasons why the model in the folder `path` cannot be trained; none if it is not a folder."""
    config = _read_json(Path(path).expanduser() / "config.json")
    kind, text = config.get("model_type", "no model_type"), {**config, **(config.get("text_config") or {})}
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
    config = _read_json(Path(path).expanduser() / "config.json")
    heads = {**config, **(config.get("text_config") or {})}.get("num_attention_heads")
    if not isinstance(heads, int) or heads % size == 0:
        return None
    return f"{path} has {heads} attention heads, which {size} ranks cannot share; set it to {math.gcd(heads, size)}"


def mixture_problem(path: str, ranks: int = 1) -> str | None:
    """Return why the model in the folder `path` has no experts, or not for this many ranks; None if it is no folder."""
    config = _read_json(Path(path).expanduser() / "config.json")
    text = {**config, **(config.get("text_config") or {})}
    experts = next((text[name] for name in EXPERT_COUNTS if text.get(name)), 0)
    if not config or (experts and experts % ranks == 0):
        return None
    if experts:
        return f"{path} has {experts} experts, which {ranks} ranks cannot share evenly"
    return f"{path} ({config.get('model_type', 'no model_type')}) is no mixture of experts"


def is_dense_and_verified(path: str) -> bool:
    """Return whether the model in the folder `path` is of a verified family and no mixture of experts."""
    config = _read_json(Path(path).expanduser() / "config.json")
    return config.get("model_type") in VERIFIED and not any(config.get(name) for name in EXPERT_COUNTS)


def family_note(path: str, model_type: str, *, published: bool = True) -> str | None:
    """Return a note for a family that is not verified, None for the others."""
    if model_type in VERIFIED:
        return None
    probe = " and the rollout engines' with the trainer's after every weight sync" if published else ""
    return (
        f"{path}: {model_type} is not one of the verified families ({', '.join(VERIFIED.values())}). Its log-probs on "
        f"packed sequences are compared with those on single ones at load{probe}; the run stops if they differ"
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


def _read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file, or {} if it cannot be read: loading the model reports that."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
