"""Which models can be trained, as far as their configuration tells before anything is loaded. Imports no torch.

What a configuration does not tell is found out when a model is loaded: packed sequences are compared with the model's
own forward pass (`verl.training.model`), and every engine with the trainer (`verl.weights.probe`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["LAYER_TYPES", "PROVEN", "family_note", "family_problems"]

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


def family_note(path: str, model_type: str) -> str | None:
    """What to say of a family that nobody has proven; nothing of the others."""
    if model_type in PROVEN:
        return None
    return (
        f"{path}: {model_type} is none of the families that were proven ({', '.join(PROVEN.values())}); it is tried: "
        "its packed log-probs are compared with its own when it is loaded, and the engine's with the trainer's after "
        "every publish, and either stops the run"
    )


def _read(path: Path) -> Mapping[str, Any]:
    """The JSON of a file; nothing if there is none, or if it is none, which is left to who loads the model."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
