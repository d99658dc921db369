"""One directory of shards: every rank writes its own, and any number of ranks can read them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from verl.checkpoint.files import FileChecksum
from verl.checkpoint.format import Entry, Loading, Reader, Saving, Writer, entries
from verl.errors import CheckpointError, VerlError

__all__ = ["load", "save"]

logger = logging.getLogger(__name__)

BASE = "base"
"""The part of a state that says what weights an adapter belongs to; the model is then the adapter."""
PER_RANK = "rng"
"""The part of a state whose keys name ranks; a run on more ranks than wrote it finds some missing."""


def save(
    state: dict[str, Any], directory: str | Path, *, group: dist.ProcessGroup | None = None
) -> dict[str, FileChecksum]:
    """Write `state` (nested dictionaries of tensors and plain values) into `directory`; all ranks call it together.

    Returns what this rank has written, by the name of the file.
    """
    writer = Writer(directory)
    with _plain_errors(directory, "written"):
        dcp.save(state, storage_writer=writer, planner=Saving(), process_group=group, no_dist=not dist.is_initialized())
    return writer.sums


def load(state: dict[str, Any], directory: str | Path, *, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Fill `state`, of the shapes that are wanted on this rank, from `directory`; all ranks call it together.

    Tensors are filled in place. Entries under "rng" that the checkpoint lacks are taken out of `state`: a rank that did
    not exist when it was written keeps the random state that it has.
    """
    if not Path(directory).is_dir():
        raise CheckpointError(
            f"checkpoint {directory}: is not there; the run that saved had no {Path(directory).name}. Use the same "
            "algorithm, or begin anew with trainer.resume_mode=disable"
        )
    stored = entries(directory)
    absent = _missing_ranks(state, stored)
    wanted = dict(state)
    if absent:
        wanted[PER_RANK] = {rank: value for rank, value in state[PER_RANK].items() if rank not in absent}
        if not wanted[PER_RANK]:
            del wanted[PER_RANK]
        logger.info("checkpoint %s has no random state for rank %s", directory, ", ".join(absent))
    _check_fit(wanted, stored, directory)
    reader = Reader(directory, stored)
    with _plain_errors(directory, "read"):
        dcp.load(
            wanted, storage_reader=reader, planner=Loading(), process_group=group, no_dist=not dist.is_initialized()
        )
    return wanted


@contextmanager
def _plain_errors(directory: str | Path, what: str) -> Iterator[None]:
    """torch gathers the failures of all ranks into one that is no `Exception`; what went wrong is the first of them."""
    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = next(iter(failed.failures.items()))
        if isinstance(error, VerlError):
            raise error from failed
        raise CheckpointError(f"checkpoint {directory}: cannot be {what} by rank {rank}: {error}") from failed


def _missing_ranks(state: Mapping[str, Any], stored: Mapping[str, Entry]) -> list[str]:
    ranks = state.get(PER_RANK, {})
    return [rank for rank in ranks if not any(key.startswith(f"{PER_RANK}.{rank}.") for key in stored)]


def _check_fit(state: Mapping[str, Any], stored: Mapping[str, Entry], directory: str | Path) -> None:
    parts = {key.partition(".")[0] for key in stored}
    if "model" in state and "model" in parts and (BASE in state) != (BASE in parts):
        raise CheckpointError(
            f"checkpoint {directory}: holds "
            + (
                "an adapter; set peft.lora_rank as it was in the run that saved it"
                if BASE in parts
                else "all weights and no adapter; set peft.lora_rank=0, or make a model of it (verl merge) and start "
                "from that"
            )
            + ", or begin anew with trainer.resume_mode=disable"
        )
    if absent := [part for part in state if part not in parts]:
        raise CheckpointError(
            f"checkpoint {directory}: {', '.join(absent)} was not saved in it (checkpoint.save_contents); "
            "leave it out of checkpoint.load_contents, or resume from another one"
        )
    problems = []
    for key, value in _flatten(state):
        there = stored.get(key)
        if there is None:
            problems.append(f"{key} is not in it")
        elif isinstance(value, torch.Tensor):
            shape = there.shape if there.dtype is not None else "no tensor"
            if shape != tuple(value.shape):
                problems.append(f"{key} has shape {shape} in it, {tuple(value.shape)} is wanted")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"checkpoint {directory} does not fit: {'; '.join(problems[:3])}{more}. "
            "It must come from the same model; check the model path, or start from another directory"
        )


def _flatten(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves under the dotted names that torch.distributed.checkpoint gives them."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
