"""Safety checks of model folders, made before anything is loaded from them.

transformers reads weights as safetensors, or with torch's `weights_only`, and runs code of a model only with
`trust_remote_code`. Two things it trusts: the paths in an index of shards, and kernels that a configuration names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
CODE = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""Names of functions; with a slash they name a repository whose code would be downloaded and run."""

PICKLED = (
    "its weights are a pickle that contains more than tensors and could run code; nothing was loaded. "
    "Use a model in safetensors format"
)
MODEL_ATTENTION = "eager"
"""The model's own attention code; transformers' sdpa silently ignores soft caps."""


def attention_for(config: PreTrainedConfig) -> str | None:
    """Return the attention to load a model with, so that soft caps are applied; None for transformers' choice."""
    return MODEL_ATTENTION if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None else None


def model_problems(path: str, *, trust_remote_code: bool = False) -> Iterator[str]:
    """Yield what makes the model folder `path` unsafe to load; nothing if it is not a folder."""
    folder = Path(path).expanduser()
    for name in INDICES:
        yield from _index_problems(folder / name)
    if not trust_remote_code:
        yield from _code_problems(folder / "config.json")


def local_path(path: str) -> str:
    """Return the folder with a model's small files: `path` itself, or the cache folder of a name on the Hub."""
    if Path(path).expanduser().is_dir():
        return path
    from transformers.utils import cached_file

    ignored = ("gated_repo", "missing_entries", "connection_errors")
    files: list[str | None] = []
    with suppress(OSError):  # loading the model reports that it does not exist
        for name in (*INDICES, "config.json"):
            files.append(cached_file(path, name, **{f"_raise_exceptions_for_{each}": False for each in ignored}))
    return next((str(Path(file).parent) for file in files if file is not None), path)


def _index_problems(path: Path) -> Iterator[str]:
    index = _read(path)
    if index is None:
        return
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict):
        yield f"{path}: is not an index of weights: weight_map is missing or not a dictionary"
        return
    for shard in sorted({str(shard) for shard in shards.values() if not _is_file_name(shard)}):
        yield (
            f"{path}: names the shard {shard!r}, which is not in the folder of the index; nothing was read. "
            "Use a model from a source that you trust"
        )


def _is_file_name(name: Any) -> bool:
    """Return whether it is a plain file name, on any operating system."""
    return isinstance(name, str) and name not in ("", ".", "..") and PureWindowsPath(name).name == name


def _code_problems(path: Path) -> Iterator[str]:
    config = _read(path)
    for part in (config, *config.values()) if isinstance(config, dict) else ():
        for name in CODE if isinstance(part, dict) else ():
            value = part.get(name)
            for kernel in value.values() if isinstance(value, dict) else (value,):
                if isinstance(kernel, str) and len(PurePosixPath(kernel).parts) > 1:
                    yield (
                        f"{path}: {name}={kernel!r} names code of another repository; remove the line, or set "
                        "actor_rollout_ref.model.trust_remote_code=True if you trust that code"
                    )


def _read(path: Path) -> Any:
    """Return the JSON of a file; None if it is missing or invalid, which loading the model reports."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
