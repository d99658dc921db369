"""The weights of a checkpoint as safetensors, in Hugging Face's layout: one file, or several with an index.

Weights go from the shards to the files one at a time; no more than one file's worth is held in memory. A model is not
needed for it, nor a process group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from verl.checkpoint.adapter import SavedAdapter, is_adapter, merge_adapter, read_saved_adapter
from verl.checkpoint.files import FileChecksum, compute_checksum, sync_directory, write
from verl.checkpoint.shards import read_index, read_tensors
from verl.errors import CheckpointError

__all__ = ["BaseWeights", "compare_weights", "export_weights", "iter_checkpoint_weights"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FILE_BYTES = 4 * 1024**3
MODEL = "model."
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


BaseWeights = Callable[[SavedAdapter], Iterable[tuple[str, Tensor]]]
"""The weights that an adapter was trained on, or an error."""


def iter_checkpoint_weights(
    directory: str | Path, *, dtype: torch.dtype | None = None, tied: bool = False, base: BaseWeights | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The weights in a folder of shards, as Hugging Face names them, floating ones in `dtype` or as they were kept.

    Of a `tied` model the head is left out: it is the embedding, and `from_pretrained` makes it so. Where the shards
    hold an adapter, what it adds is merged into the weights of its `base`.
    """
    if not any(name.startswith(MODEL) for name in read_index(directory).tensors):
        raise CheckpointError(
            f"checkpoint {directory}: holds no weights; it must be saved with model among "
            "actor_rollout_ref.actor.checkpoint.save_contents"
        )
    embedding: Tensor | None = None
    for name, tensor in _held(directory, base):
        if tied and name.endswith(EMBEDDING):
            embedding = tensor
        if tied and name == HEAD:
            if embedding is None:
                embedding = _embedding(directory)
            if not torch.equal(tensor, embedding):
                raise CheckpointError(
                    f"checkpoint {directory}: {HEAD} is not the embedding, and the model's configuration ties them "
                    "(tie_word_embeddings); it was trained with another configuration, name that by --hf_model_path"
                )
            continue
        yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _held(directory: str | Path, base: BaseWeights | None) -> Iterator[tuple[str, Tensor]]:
    found, adapter = read_tensors(directory, prefix=MODEL), read_saved_adapter(directory)
    if adapter is None:
        yield from found
        return
    if base is None:
        raise CheckpointError(f"checkpoint {directory}: holds an adapter of {adapter.base}, and not the weights below")
    tensors = dict(found)
    yield from merge_adapter(base(adapter), tensors, adapter.scale)
    yield from ((name, tensor) for name, tensor in tensors.items() if not is_adapter(name))


def export_weights(
    weights: Iterable[tuple[str, Tensor]], folder: Path, *, file_bytes: int = FILE_BYTES
) -> dict[str, FileChecksum]:
    """Write the weights into `folder`; what was written, by the name of the file. Every file is read again for that."""
    drafts: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = size = 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > file_bytes:
            drafts.append(_save(held, folder, len(drafts)))
            held, size = {}, 0
        held[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    drafts.append(_save(held, folder, len(drafts)))
    names = [_file_name(number, len(drafts)) for number in range(len(drafts))]
    for number, file in enumerate(names):
        os.replace(_draft(folder, number), folder / file)
    written = {file: compute_checksum(folder / file) for file in names}
    if len(names) > 1:
        places = {name: file for file, held_names in zip(names, drafts, strict=True) for name in held_names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        written[INDEX] = write(folder / INDEX, json.dumps(index, indent=2, sort_keys=True).encode())
    sync_directory(folder)
    return written


def compare_weights(expected: Iterable[tuple[str, Tensor]], folder: str | Path) -> list[str]:
    """How the weights in a Hugging Face folder differ from those expected, in words: names, shapes, types, numbers."""
    gaps = []
    with _opened(Path(folder)) as found:
        for name, tensor in expected:
            other = found.pop(name).get_tensor(name) if name in found else None
            if other is None:
                gaps.append(f"{name} is missing")
            elif other.shape != tensor.shape:
                gaps.append(f"{name} has shape {tuple(other.shape)}, {tuple(tensor.shape)} is right")
            elif other.dtype != tensor.dtype:
                gaps.append(f"{name} is {_type(other)}, {_type(tensor)} is right")
            elif not torch.equal(other, tensor):
                apart = float((other.double() - tensor.double()).abs().max())
                gaps.append(f"{name} has other numbers, {apart:.3g} apart")
        return gaps + [f"{name} is too many" for name in sorted(found)]


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any]]:
    """The files of safetensors in which the weights lie, by the names of the weights."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: there are no weights in safetensors (model*.safetensors)")
    found: dict[str, Any] = {}
    with ExitStack() as closing:
        for file in files:
            try:
                opened = closing.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: cannot be read: {error}") from error
            found |= dict.fromkeys(opened.keys(), opened)
        yield found


def _embedding(directory: str | Path) -> Tensor:
    for name, tensor in read_tensors(directory, prefix=MODEL):
        if name.endswith(EMBEDDING):
            return tensor
    raise CheckpointError(f"checkpoint {directory}: has no {EMBEDDING}, to which {HEAD} is tied")


def _save(held: Mapping[str, Tensor], folder: Path, number: int) -> list[str]:
    path = _draft(folder, number)
    try:
        save_file(dict(held), path, metadata={"format": "pt"})
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be written: {error}; see that there is room, and try again") from error
    return list(held)


def _draft(folder: Path, number: int) -> Path:
    return folder / f".model-{number + 1:05d}.draft"


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
