"""Finds the shards or the model that a path means: of a run's folder, a checkpoint, or a folder of shards."""

from __future__ import annotations

from pathlib import Path

from verl.checkpoint.manifest import METADATA, PREFIX, CheckpointDir
from verl.errors import CheckpointError, ConfigError


def find_shards(path: Path, model: str = "actor") -> Path | None:
    """Return the folder of shards of `model` in a run's newest checkpoint, in a checkpoint, or `path` itself.

    None if the path is none of these; `CheckpointError` if a run has no complete checkpoint.
    """
    if _has_shards(path):
        return path
    if any(path.glob(f"{PREFIX}*")):
        if (step := CheckpointDir(path).latest()) is None:
            raise CheckpointError(f"{path}: the run has no complete checkpoint")
        path = path / f"{PREFIX}{step}"
    return path / model if _has_shards(path / model) else None


def _has_shards(path: Path) -> bool:
    """Return whether a folder has shards; a Hugging Face model may have a metadata.json, too."""
    return (path / METADATA).is_file() and any(path.glob("shard-*.safetensors"))


def find_saved_model(path: str, key: str) -> str:
    """Return the model for `from_pretrained` in a run's folder or checkpoint; any other path unchanged.

    `key` is the setting that names the path. Raises `ConfigError` if the checkpoint was saved without such a model.
    """
    shards = find_shards(Path(path).expanduser())
    if shards is None:
        return path
    model = shards / "huggingface"
    if not any(model.glob("*.safetensors")):
        raise ConfigError(
            [
                f"{key}={path}: is a checkpoint without a model for generation (trainer.save_hf); run `verl merge "
                f"{path} --target_dir merged` and set {key}=merged"
            ]
        )
    return str(model)
