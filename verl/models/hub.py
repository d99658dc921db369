"""Finds files of models in folders and on the Hugging Face Hub. transformers is imported when a file is looked up."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from verl.models.model_folder import CONFIG, INDICES, WEIGHTS, WEIGHTS_INDEX, read_header, read_json

_NOT_RAISED = ("gated_repo", "missing_entries", "connection_errors")


def find_file(path: str, name: str) -> str | None:
    """Return a file of a model in a folder, or by its name on the Hub, which downloads it; None if it has none."""
    from transformers.utils import cached_file

    file = cached_file(path, name, **{f"_raise_exceptions_for_{each}": False for each in _NOT_RAISED})
    return None if file is None else str(file)


def find_weights(path: str) -> dict[str, str]:
    """Return the names of a model's weights and the safetensors file of each.

    Raises:
        FileNotFoundError: If the model has no weights in this format, or a file is missing.
        ValueError: If a file is damaged.
    """
    if (single := find_file(path, WEIGHTS)) is not None:
        return dict.fromkeys(read_header(Path(single))[0], single)
    index = find_file(path, WEIGHTS_INDEX)
    if index is None:
        raise FileNotFoundError("it has no weights in safetensors format")
    shards: dict[str, str] = read_json(Path(index))["weight_map"]
    files = {name: find_file(path, name) for name in dict.fromkeys(shards.values())}
    if missing := [name for name, file in files.items() if file is None]:
        raise FileNotFoundError(f"{missing[0]} is missing")
    return {key: str(files[name]) for key, name in shards.items()}


def local_path(path: str) -> str:
    """Return the folder with a model's small files: `path` itself, or the cache folder of a name on the Hub."""
    if Path(path).expanduser().is_dir():
        return path
    files: list[str | None] = []
    with suppress(OSError):  # loading the model reports that it does not exist
        for name in (*INDICES, CONFIG):
            files.append(find_file(path, name))
    return next((str(Path(file).parent) for file in files if file is not None), path)
