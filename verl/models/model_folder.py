"""The files of a Hugging Face model: their names, config.json, and the headers of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.errors import ConfigError

CONFIG = "config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
INDICES = (WEIGHTS_INDEX, "pytorch_model.bin.index.json")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json, of which an MoE has one."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_MAX_HEADER = 100 << 20


def read_json(file: Path) -> Any:
    """Return the content of a JSON file; raises `OSError`, or `ValueError` if it is not valid."""
    try:
        return json.loads(file.read_bytes())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_config(path: str) -> dict[str, Any]:
    """Return the config.json in the folder `path`, or the file `path`; {} if there is none that can be read.

    Loading the model reports what is wrong with the file.
    """
    try:
        content = read_json(_config_file(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def require_config(path: str) -> dict[str, Any]:
    """Return the config.json in the folder `path`, or the file `path`; raises `ConfigError`."""
    file = _config_file(path)
    try:
        content = read_json(file)
    except FileNotFoundError:
        raise ConfigError(
            [
                f"{path}: its config.json is not on this machine; download it (hf download {path} config.json) and set "
                "the path of the folder or of the file"
            ]
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError([f"{file}: cannot be read as JSON: {error}"]) from error
    if not isinstance(content, dict):
        raise ConfigError([f"{file}: is not a JSON object; give the config.json of a Hugging Face model"])
    return content


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the language model, which a multimodal model has in a section of its own."""
    return {**config, **(config.get("text_config") or {})}


def read_header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the header of a safetensors file and the offset of its data; a `ValueError` if the file is not complete.

    The header has the `dtype`, `shape` and `data_offsets` of every tensor by name.
    """
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size)) if size <= _MAX_HEADER else None
        assert isinstance(header, dict)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        assert all({"dtype", "shape"} <= entry.keys() for entry in entries.values())
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        assert file.stat().st_size == 8 + size + end
    except (OSError, ValueError, RecursionError, AssertionError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{file.name} is not a complete safetensors file") from error
    return entries, 8 + size


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a safetensors file by name."""
    return {name: tuple(entry["shape"]) for name, entry in read_header(file)[0].items()}


def _config_file(path: str) -> Path:
    file = Path(path).expanduser()
    return file if file.is_file() else file / CONFIG


def is_moe(path: str) -> bool:
    """Return whether the model in the folder `path` has experts; False if there is no such folder."""
    return count_experts(read_config(path)) > 0


def count_experts(config: Mapping[str, Any]) -> int:
    """Return how many experts each MoE layer has, from the content of a config.json; 0 if the model is dense."""
    text = text_config(config)
    return next((int(text[key]) for key in _EXPERT_COUNTS if text.get(key)), 0)
