"""Export of a checkpoint's weights in Hugging Face's layout: one safetensors file, or several with an index.

At most one file's worth of weights is held in memory. Neither a model nor a process group is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl.checkpoint.adapter import SavedAdapter, is_adapter, merge_adapter, read_saved_adapter
from verl.checkpoint.files import FileChecksum, sync_directory, write
from verl.checkpoint.shards import read_index, read_tensors, write_shard
from verl.errors import CheckpointError
from verl.models.model_folder import WEIGHTS, WEIGHTS_INDEX

FILE_BYTES = 4 * 1024**3
MODEL = "model."
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


BaseWeights = Callable[[SavedAdapter], Iterable[tuple[str, Tensor]]]
"""Returns the base weights of an adapter, or raises."""


def iter_checkpoint_weights(
    directory: str | Path, *, dtype: torch.dtype | None = None, tied: bool = False, base: BaseWeights | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in a folder of shards by their names in the model, floating-point ones in `dtype` if given.

    The head of a `tied` model is omitted: it is the embedding. An adapter is merged into the weights of its `base`.
    """
    if not any(name.startswith(MODEL) for name in read_index(directory).tensors):
        raise CheckpointError(
            f"checkpoint {directory}: has no weights; add model to actor_rollout_ref.actor.checkpoint.save_contents "
            "when saving"
        )
    embedding: Tensor | None = None
    for name, tensor in _read_merged(directory, base):
        if tied and name.endswith(EMBEDDING):
            embedding = tensor
        if tied and name == HEAD:
            if embedding is None:
                embedding = _read_embedding(directory)
            if not torch.equal(tensor, embedding):
                raise CheckpointError(
                    f"checkpoint {directory}: {HEAD} differs from the embedding, but the configuration ties them "
                    "(tie_word_embeddings); pass the configuration that it was trained with by --hf_model_path"
                )
            continue
        yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _read_merged(directory: str | Path, base: BaseWeights | None) -> Iterator[tuple[str, Tensor]]:
    stored, adapter = read_tensors(directory, prefix=MODEL), read_saved_adapter(directory)
    if adapter is None:
        yield from stored
        return
    if base is None:
        raise CheckpointError(f"checkpoint {directory}: holds an adapter of {adapter.base} without its base weights")
    tensors = dict(stored)
    yield from merge_adapter(base(adapter), tensors, adapter.scale)
    yield from ((name, tensor) for name, tensor in tensors.items() if not is_adapter(name))


def export_weights(
    weights: Iterable[tuple[str, Tensor]], folder: Path, *, file_bytes: int = FILE_BYTES
) -> dict[str, FileChecksum]:
    """Write the weights into `folder`; returns checksums by file name."""
    drafts: list[tuple[list[str], FileChecksum]] = []
    pending: dict[str, Tensor] = {}
    total = size = 0

    def write_draft() -> None:
        drafts.append((list(pending), write_shard(_draft(folder, len(drafts)), pending)))

    for name, tensor in weights:
        if pending and size + tensor.nbytes > file_bytes:
            write_draft()
            pending, size = {}, 0
        pending[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write_draft()
    written: dict[str, FileChecksum] = {}
    weight_map: dict[str, str] = {}
    for index, (stored, checksum) in enumerate(drafts):
        file = WEIGHTS if len(drafts) == 1 else f"model-{index + 1:05d}-of-{len(drafts):05d}.safetensors"
        os.replace(_draft(folder, index), folder / file)
        written[file] = checksum
        weight_map |= dict.fromkeys(stored, file)
    if len(drafts) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        written[WEIGHTS_INDEX] = write(folder / WEIGHTS_INDEX, json.dumps(content, indent=2, sort_keys=True).encode())
    sync_directory(folder)
    return written


def compare_weights(expected: Iterable[tuple[str, Tensor]], folder: str | Path) -> list[str]:
    """Return the differences of a Hugging Face folder from the expected weights: names, shapes, types, values."""
    differences = []
    with _open_weights(Path(folder)) as files:
        for name, tensor in expected:
            other = files.pop(name).get_tensor(name) if name in files else None
            if other is None:
                differences.append(f"{name} is missing")
            elif other.shape != tensor.shape:
                differences.append(f"{name} has shape {tuple(other.shape)}, expected {tuple(tensor.shape)}")
            elif other.dtype != tensor.dtype:
                differences.append(f"{name} is {other.dtype}, expected {tensor.dtype}")
            elif not torch.equal(other, tensor):
                distance = float((other.double() - tensor.double()).abs().max())
                differences.append(f"{name} has other values, by up to {distance:.3g}")
        return differences + [f"{name} is unexpected" for name in sorted(files)]


@contextmanager
def _open_weights(folder: Path) -> Iterator[dict[str, Any]]:
    """Open the safetensors files of a folder; yields them by the names of the weights."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: has no weights in safetensors (model*.safetensors)")
    by_name: dict[str, Any] = {}
    with ExitStack() as closing:
        for file in files:
            try:
                opened = closing.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: cannot be read: {error}") from error
            by_name |= dict.fromkeys(opened.keys(), opened)
        yield by_name


def _read_embedding(directory: str | Path) -> Tensor:
    for name, tensor in read_tensors(directory, prefix=MODEL):
        if name.endswith(EMBEDDING):
            return tensor
    raise CheckpointError(f"checkpoint {directory}: has no {EMBEDDING}, to which {HEAD} is tied")


def _draft(folder: Path, index: int) -> Path:
    return folder / f".model-{index + 1:05d}.draft"
