"""Which models can be trained, as far as their configuration tells before anything is loaded. Imports no torch.

What a configuration does not tell is found out when a model is loaded: packed sequences are compared with the model's
own forward pass (`verl.training.model`), and every engine with the trainer (`verl.weights.probe`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["LAYER_TYPES", "PROVEN", "family_note", "family_problems", "packing_length_problem"]

LAYER_TYPES = {"full_attention", "sliding_attention"}
PROVEN = {
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "llama": "Llama",
    "mistral": "Mistral",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "phi3": "Phi 3",
    "qwen3_moe": "Qwen3-MoE",
}
"""Trained, published to vLLM, saved, resumed and merged by `make show-families`, by what config.json calls them."""

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
BESIDE_TEXT = ("vision_config", "audio_config")


def family_problems(path: str) -> Iterator[str]:
    """Why the model in the folder `path` cannot be trained, in words. Nothing is said of a name that is no folder."""
    config = _read(Path(path).expanduser() / "config.json")
    kind, text = config.get("model_type", "no model_type"), {**config, **(config.get("text_config") or {})}
    odd = {str(each) for each in text.get("layer_types") or ()} - LAYER_TYPES
    if config.get("is_encoder_decoder"):
        yield f"{path} ({kind}): has an encoder, and only decoders are trained; take a causal language model"
    if text.get("model_type") in STATEFUL or odd:
        what = ", ".join(sorted(odd)) or "a state that runs through a sequence"
        yield (
            f"{path} ({kind}): layers with {what} cannot be trained on packed sequences; supported are "
            f"{', '.join(sorted(LAYER_TYPES))}"
        )
    for part in BESIDE_TEXT:
        if config.get(part):
            yield f"{path} ({kind}): has a part that is not text ({part}), which is not supported; take a text model"
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        yield f"{path} ({kind}): its weights are quantised ({method}) and cannot be trained; take the original"


def family_note(path: str, model_type: str, *, published: bool = True) -> str | None:
    """What to say of a family that nobody has proven; nothing of the others."""
    if model_type in PROVEN:
        return None
    probed = ", and the engine's with the trainer's after every publish; either" if published else ", which"
    return (
        f"{path}: {model_type} is none of the families that were proven ({', '.join(PROVEN.values())}); it is tried: "
        f"its packed log-probs are compared with its own when it is loaded{probed} stops the run"
    )


def packing_length_problem(path: str, config: Mapping[str, Any], longest: int, settings: str) -> str | None:
    """Why sequences of `longest` tokens, as the `settings` allow, cannot be packed; None: they can.

    Some rotary positions change for a whole row as soon as one sequence in it is longer than the model was made for:
    what a sequence is computed to would depend on its neighbours.
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
        f"{settings}: sequences may have {longest} tokens, and beyond {limit} the {kind} positions of {path} change "
        f"for all sequences that are packed together; set {settings} to {limit} at most"
    )


def _read(path: Path) -> Mapping[str, Any]:
    """The JSON of a file; nothing if there is none, or if it is none, which is left to who loads the model."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
