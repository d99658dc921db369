"""Adapters (LoRA) in PEFT's format: names of tensors, configuration, merging into the base weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from verl.checkpoint.shards import read_values
from verl.errors import CheckpointError
from verl.models.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS

NAME = "default"  # PEFT's name of a model's only adapter; not part of the names in files
BASE = ".base_layer."
PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """The configuration of an adapter in a checkpoint, and the fingerprint of its base weights."""

    config: dict[str, Any]
    fingerprint: str

    @property
    def base(self) -> str:
        return str(self.config["base_model_name_or_path"])

    @property
    def scale(self) -> float:
        return float(self.config["lora_alpha"]) / float(self.config["r"])


def read_saved_adapter(directory: str | Path) -> SavedAdapter | None:
    """Return the adapter that a folder of shards describes; None if it holds all weights."""
    values = read_values(directory, "base.")
    if not values:
        return None
    try:
        return SavedAdapter(json.loads(values["adapter"]), str(values["fingerprint"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {directory}: its adapter cannot be read: {error}") from error


def check_base(current: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Raise a `CheckpointError` if a saved adapter was trained on other weights, or has another shape or scale."""
    config, other = json.loads(current["adapter"]), json.loads(saved["adapter"])
    if current["fingerprint"] != saved["fingerprint"]:
        raise CheckpointError(
            f"the adapter in the checkpoint belongs to other weights ({other['base_model_name_or_path']} when it was "
            f"saved) than {config['base_model_name_or_path']}; set the model's path to the former, or start over with "
            "trainer.resume_mode=disable"
        )
    for setting, key in {"lora_rank": "r", "lora_alpha": "lora_alpha", "target_modules": "target_modules"}.items():
        if config[key] != other[key]:
            value = str(other[key]).replace(" ", "").replace("'", "")
            raise CheckpointError(
                f"peft.{setting}: is {config[key]}, but the adapter in the checkpoint was trained with {other[key]}; "
                f"set peft.{setting}={value}, or start over with trainer.resume_mode=disable"
            )


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def original_name(name: str) -> str:
    """Return the name of a base weight in the model without an adapter.

    >>> original_name("model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    """
    return name.replace(BASE, ".")


def peft_name(name: str) -> str:
    """Return the name of an adapter's tensor in PEFT's files.

    >>> peft_name("model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return PREFIX + name.replace(f".{NAME}.", ".")


def merge_adapter(
    weights: Iterable[tuple[str, Tensor]], adapter: Mapping[str, Tensor], scale: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights by their original names with the adapter merged into them, computed in float32.

    `adapter` holds the two factors of a weight by its original name: `x.lora_A.default.weight` for `x.weight`.
    """
    for name, weight in weights:
        stem = name.removesuffix(".weight")
        down = adapter.get(f"{stem}.lora_A.{NAME}.weight")
        if down is None or stem == name:
            yield name, weight
            continue
        up = adapter[f"{stem}.lora_B.{NAME}.weight"]
        yield name, (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)


def adapter_config(*, base: str, rank: int, alpha: int, targets: str | Iterable[str]) -> dict[str, Any]:
    """Return the configuration of an adapter of a causal model, for PEFT and vLLM."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
        "inference_mode": True,
    }


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter for `PeftModel.from_pretrained`; tensors by their names in PEFT's files."""
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / ADAPTER_WEIGHTS, {"format": "pt"}
    )
