"""Saving and loading a sharded state: every rank writes one shard, and any number of ranks can load them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl.checkpoint.adapter import check_base
from verl.checkpoint.files import FileChecksum, make_directory, suggest_disk_fix
from verl.checkpoint.shards import (
    METADATA,
    Part,
    ShardFiles,
    ShardIndex,
    TensorEntry,
    read_index,
    shard_name,
    write_index,
    write_shard,
)
from verl.errors import CheckpointError, VerlError
from verl.types import LocalShard

T = TypeVar("T")
logger = logging.getLogger(__name__)

BASE = "base"
"""The part of a state that describes the weights below an adapter; the model is then the adapter."""
PER_RANK = "rng"
"""The part of a state whose keys are ranks; a run on more ranks than wrote it lacks some."""


def save(
    state: dict[str, Any], directory: str | Path, *, group: dist.ProcessGroup | None = None
) -> dict[str, FileChecksum]:
    """Write `state` into `directory`; all ranks call it together.

    Args:
        state: Nested dictionaries of plain values, tensors of which all ranks have the same, and `LocalShard`s or
            DTensors of tensors that are distributed over the ranks. Shards of several ranks may be equal; together
            they must fill the whole.
        directory: Where to write.
        group: The process group for the collectives; None: the default one.

    Returns:
        The checksums of the files that all ranks have written, by name.
    """
    folder, leaves = Path(directory), dict(_flatten(state))
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    file = shard_name(rank, ranks)

    def describe() -> ShardIndex:
        make_directory(folder)
        return _describe(leaves, file)

    index = _assign_parts(_run_on_all_ranks(describe, folder, "written", group))

    def write() -> dict[str, FileChecksum]:
        owned = (name for name, entry in index.tensors.items() for part in entry.parts if part.file == file)
        return {file: write_shard(folder / file, {name: _get_tensor(leaves[name]) for name in owned})}

    def finish() -> dict[str, FileChecksum]:
        return {METADATA: write_index(folder, index)} if rank == 0 else {}

    written = _run_on_all_ranks(write, folder, "written", group)
    written += _run_on_all_ranks(finish, folder, "written", group)
    return {name: checksum for part in written for name, checksum in part.items()}


def load(state: dict[str, Any], directory: str | Path, index: ShardIndex | None = None) -> dict[str, Any]:
    """Fill `state`, which has the shapes that this rank needs, from `directory`; all ranks call it together.

    `index` is that of the directory, if it has been read already. Tensors are filled in place. Entries under "rng" that
    the checkpoint lacks are removed from the result: a rank that did not exist when it was written keeps its random
    state.
    """
    loaded: dict[str, Any] = {}
    contents = index or read_index_once(directory)
    _run_on_all_ranks(lambda: loaded.update(_load(state, Path(directory), contents)), directory, "read")
    return loaded


def load_folders(states: Mapping[str, dict[str, Any]], directory: Path) -> dict[str, dict[str, Any]]:
    """Return the states of several models from the folders of a checkpoint; all ranks call it together.

    An adapter is refused if the weights below it are not those that it was trained with.
    """
    indices = {folder: read_index_once(directory / folder) for folder in states}
    for folder, state in states.items():
        if BASE in state and (saved := indices[folder].values_below(f"{BASE}.")):
            check_base(state[BASE], saved)
    return {folder: load(state, directory / folder, indices[folder]) for folder, state in states.items()}


def read_index_once(directory: str | Path) -> ShardIndex:
    """Return the index of a directory; all ranks call it together, and only rank 0 reads the file.

    Parsing takes seconds at 64 ranks, because an index has an entry for every part of every tensor.
    """
    outcome: list[Any] = [None, ""]
    cause: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome = [read_index(directory), ""]
        except VerlError as error:
            outcome, cause = [None, str(error)], error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    index, message = outcome
    if message:
        raise CheckpointError(message) from cause
    assert isinstance(index, ShardIndex)
    return index


def _load(state: dict[str, Any], directory: Path, index: ShardIndex) -> dict[str, Any]:
    stored = [*index.tensors, *index.values]
    wanted = dict(state)
    absent = [rank for rank in state.get(PER_RANK, {}) if not any(n.startswith(f"{PER_RANK}.{rank}.") for n in stored)]
    if absent:
        wanted[PER_RANK] = {rank: value for rank, value in state[PER_RANK].items() if rank not in absent}
        if not wanted[PER_RANK]:
            del wanted[PER_RANK]
        logger.info("checkpoint %s has no random state for rank %s", directory, ", ".join(absent))
    _check_fit(wanted, index, directory)
    with ShardFiles(directory) as files:
        for name, leaf in _flatten(wanted):
            if isinstance(leaf, Tensor | LocalShard) and (shard := get_local_shard(leaf)).tensor is not None:
                files.fill(shard.tensor, shard.offsets, name, index.tensors[name])
    _set_values(wanted, index.values)
    return wanted


def _describe(leaves: Mapping[str, Any], file: str) -> ShardIndex:
    """Return the index of what this rank holds, as if its shard stored all of it."""
    tensors: dict[str, TensorEntry] = {}
    values: dict[str, Any] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, Tensor | LocalShard):
            shard = get_local_shard(leaf)
            parts = () if shard.tensor is None else (Part(shard.offsets, tuple(shard.tensor.shape), file),)
            tensors[name] = TensorEntry(shard.dtype, shard.shape, parts)
            continue
        try:
            values[name] = json.loads(json.dumps(leaf))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name}: {leaf!r} cannot be stored in a checkpoint: {error}") from error
    return ShardIndex(tensors, values)


def _assign_parts(held: Sequence[ShardIndex]) -> ShardIndex:
    """Merge what the ranks hold; where several hold the same part, they take turns in storing it."""
    entries: dict[str, TensorEntry] = {}
    holders: dict[str, dict[Any, list[Part]]] = {}
    for rank in held:
        entries |= rank.tensors
        for name, entry in rank.tensors.items():
            for part in entry.parts:
                holders.setdefault(name, {}).setdefault((part.offsets, part.sizes), []).append(part)
    turn = count()
    for name, boxes in holders.items():
        entries[name] = replace(entries[name], parts=tuple(each[next(turn) % len(each)] for each in boxes.values()))
    return ShardIndex(entries, {name: value for rank in held for name, value in rank.values.items()})


def _run_on_all_ranks(
    work: Callable[[], T], directory: str | Path, verb: str, group: dist.ProcessGroup | None = None
) -> list[T]:
    """Return the results of all ranks; if one fails, raise its error on all of them, so that none waits for it."""
    outcome: tuple[Any, str] = (None, "")
    cause: Exception | None = None
    try:
        outcome = work(), ""
    except Exception as error:  # noqa: BLE001 - raised again below, on every rank
        rank = dist.get_rank() if dist.is_initialized() else 0
        message = f"checkpoint {directory}: cannot be {verb} by rank {rank}: {error}"
        if isinstance(error, OSError) and verb == "written":
            message += f". {suggest_disk_fix(Path(directory).parent, error)}"
        outcome = None, str(error) if isinstance(error, VerlError) else message
        cause = error
    outcomes: list[Any] = [outcome]
    if dist.is_initialized():
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome, group=group)
    for _, message in outcomes:
        if message:
            raise CheckpointError(message) from cause
    return [result for result, _ in outcomes]


def _check_fit(state: Mapping[str, Any], index: ShardIndex, directory: Path) -> None:
    parts = {name.partition(".")[0] for name in (*index.tensors, *index.values)}
    if "model" in state and "model" in parts and (BASE in state) != (BASE in parts):
        content = (
            "an adapter; set peft.lora_rank as it was in the run that saved it"
            if BASE in parts
            else "all weights and no adapter; set peft.lora_rank=0, or export it (verl merge) and start from that model"
        )
        raise CheckpointError(
            f"checkpoint {directory}: holds {content}, or start from the beginning with trainer.resume_mode=disable"
        )
    if absent := [part for part in state if part not in parts]:
        raise CheckpointError(
            f"checkpoint {directory}: {', '.join(absent)} was not saved in it (checkpoint.save_contents); "
            "remove it from checkpoint.load_contents, or resume from another checkpoint"
        )
    problems = []
    for name, leaf in _flatten(state):
        if name not in index.tensors and name not in index.values:
            problems.append(f"{name} is not in it")
        elif isinstance(leaf, Tensor | LocalShard):
            shape = index.tensors[name].shape if name in index.tensors else "no tensor"
            if shape != tuple(leaf.shape):
                problems.append(f"{name} has shape {shape} in it, {tuple(leaf.shape)} is needed")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        fix = "It must come from the same model; check the model path, or start from another directory"
        if all(problem.startswith("optimizer.") for problem in problems):
            fix = (
                "The run that saved it used another optimizer; set optim.name as it was, or remove optimizer from "
                "checkpoint.load_contents to start with new optimizer state"
            )
        raise CheckpointError(f"checkpoint {directory} does not fit: {'; '.join(problems[:3])}{more}. {fix}")


def get_local_shard(tensor: Tensor | LocalShard) -> LocalShard:
    """Return this rank's shard of a tensor; without a copy, so that it can be filled in place."""
    if isinstance(tensor, LocalShard):
        return tensor
    local, offsets = tensor.detach(), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local = tensor.to_local().detach()
    return LocalShard(local, tuple(offsets), tuple(tensor.shape), tensor.dtype)


def _get_tensor(leaf: Tensor | LocalShard) -> Tensor:
    tensor = get_local_shard(leaf).tensor
    assert tensor is not None, "a rank stores what it has"
    return tensor


def _flatten(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield leaves under dotted names."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _set_values(state: dict[str, Any], values: Mapping[str, Any], prefix: str = "") -> None:
    for key, value in state.items():
        if isinstance(value, dict):
            _set_values(value, values, f"{prefix}{key}.")
        elif not isinstance(value, Tensor | LocalShard):
            state[key] = values[f"{prefix}{key}"]
