"""Models come from elsewhere: their small files are looked at before anybody loads what they point to.

transformers reads weights as safetensors, or with torch's `weights_only`, and runs code beside a model only with
`trust_remote_code`. Two things it takes on trust: where the shards of an index lie, and whose attention kernel a
configuration names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["MODEL_ATTENTION", "PICKLED", "attention_for", "local_path", "model_problems"]

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
CODE = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""Names of functions; with a slash they name a repository, whose code would be fetched and run."""

PICKLED = (
    "its weights are a pickle that holds more than tensors, and would run code; nothing of it was loaded. "
    "Take a model in safetensors"
)


MODEL_ATTENTION = "eager"
"""The model's own word on its attention; transformers' sdpa leaves out soft caps without saying so."""


def attention_for(config: PreTrainedConfig) -> str | None:
    """The attention to load a model with, so that it computes what it defines; None: transformers' choice does."""
    return MODEL_ATTENTION if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None else None


def model_problems(path: str, *, trust_remote_code: bool = False) -> Iterator[str]:
    """What must not be loaded in the model folder `path`, in words. Nothing is said of a name that is no folder."""
    folder = Path(path).expanduser()
    for name in INDICES:
        yield from _index_problems(folder / name)
    if not trust_remote_code:
        yield from _code_problems(folder / "config.json")


def local_path(path: str) -> str:
    """The folder with the small files of a model: `path` itself, or where those of a name on the Hub lie by now."""
    if Path(path).expanduser().is_dir():
        return path
    from transformers.utils import cached_file

    quietly = ("gated_repo", "missing_entries", "connection_errors")
    found: list[str | None] = []
    with suppress(OSError):  # there is no such model: who loads it says so
        for name in (*INDICES, "config.json"):
            found.append(cached_file(path, name, **{f"_raise_exceptions_for_{each}": False for each in quietly}))
    return next((str(Path(file).parent) for file in found if file is not None), path)


def _index_problems(path: Path) -> Iterator[str]:
    index = _read(path)
    if index is None:
        return
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict):
        yield f"{path}: is no index of weights: it lacks weight_map, a dictionary"
        return
    for shard in sorted({str(shard) for shard in shards.values() if not _lies_beside(shard)}):
        yield (
            f"{path}: names the shard {shard!r}, and shards lie beside their index; nothing was read. "
            "Take the model from a source that you trust"
        )


def _lies_beside(name: Any) -> bool:
    """Whether it is the plain name of a file, on any system."""
    return isinstance(name, str) and name not in ("", ".", "..") and PureWindowsPath(name).name == name


def _code_problems(path: Path) -> Iterator[str]:
    config = _read(path)
    for part in (config, *config.values()) if isinstance(config, dict) else ():
        for name in CODE if isinstance(part, dict) else ():
            named = part.get(name)
            for kernel in named.values() if isinstance(named, dict) else (named,):
                if isinstance(kernel, str) and len(PurePosixPath(kernel).parts) > 1:
                    yield (
                        f"{path}: {name}={kernel!r} is code from elsewhere, which the model asks to run; take the line "
                        "away, or set actor_rollout_ref.model.trust_remote_code=True if you trust both"
                    )


def _read(path: Path) -> Any:
    """The JSON of a file; None if there is none, or if it is none, which is left to who loads the model."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
