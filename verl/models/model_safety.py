"""Safety checks of model folders, made before anything is loaded from them.

transformers reads weights as safetensors, or with torch's `weights_only`, and runs code of a model only with
`trust_remote_code`. It trusts two things, which are checked here: the paths in an
index of shards, and the kernels that a configuration names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from verl.models.model_folder import CONFIG, INDICES, read_config, read_json

CODE = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""Names of functions; with a slash they name a repository whose code would be downloaded and run."""

PICKLED = (
    "its weights are a pickle that contains more than tensors and could run code; nothing was loaded. "
    "Use a model in safetensors format"
)


def model_problems(path: str, *, trust_remote_code: bool = False) -> Iterator[str]:
    """Yield what makes the model folder `path` unsafe to load; nothing if it is not a folder."""
    folder = Path(path).expanduser()
    for name in INDICES:
        yield from _index_problems(folder / name)
    if not trust_remote_code:
        yield from _code_problems(folder / CONFIG)


def _index_problems(path: Path) -> Iterator[str]:
    try:
        index = read_json(path)
    except (OSError, ValueError):  # loading the model reports it
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
    config = read_config(str(path))
    for part in (config, *config.values()):
        for name in CODE if isinstance(part, dict) else ():
            value = part.get(name)
            for kernel in value.values() if isinstance(value, dict) else (value,):
                if isinstance(kernel, str) and len(PurePosixPath(kernel).parts) > 1:
                    yield (
                        f"{path}: {name}={kernel!r} names code of another repository; remove the line, or set "
                        "actor_rollout_ref.model.trust_remote_code=True if you trust that code"
                    )
