"""Shared by acceptance tests of checkpoints: a real save in this process, as the loop makes it, with its messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from _common import ROOT  # noqa: F401 - makes the helpers of tests importable
from recording_console import RecordingConsole

from verl.checkpoint.background import BackgroundWriter
from verl.checkpoint.files import make_directory, write
from verl.checkpoint.manifest import CheckpointDir, find_corruption
from verl.checkpoint.save import load
from verl.checkpoint.shards import read_index, read_tensors
from verl.trainer.checkpointing import Checkpointer, find_checkpoint

FOLDERS = ("actor", "critic")


class LocalPolicy:
    """What train workers do for a checkpoint, in this process: the same writer, on one rank."""

    def __init__(self, states: Mapping[str, dict[str, Any]]) -> None:
        self.states, self._writer = states, BackgroundWriter()

    async def save(self, directory: str, trainer: Mapping[str, Any], *, is_last: bool = False) -> None:
        self._writer.start(self.states, Path(directory), trainer, [_small_files])

    async def poll_save(self, *, wait: bool) -> float | None:
        return self._writer.seconds if self._writer.poll(wait=wait) else None


def _small_files(directory: Path) -> dict[str, Any]:
    folder = directory / "actor" / "huggingface"
    make_directory(folder)
    return {"actor/huggingface/config.json": write(folder / "config.json", b'{"model_type": "qwen2"}')}


def save(root: Path, step: int, states: Mapping[str, dict[str, Any]], *, keep: int | None = None) -> RecordingConsole:
    """A whole save as the loop makes it: begin, copy, write, commit, delete the oldest."""
    screen = RecordingConsole()

    async def run() -> None:
        checkpointer = Checkpointer(LocalPolicy(states), CheckpointDir(root), screen, keep=keep)
        await checkpointer.save(step, {"data": {"position": 10 * step}})
        await checkpointer.finish()

    asyncio.run(run())
    return screen


def chosen(root: Path) -> tuple[int | None, list[str]]:
    """The step that a run with `trainer.resume_mode=auto` would resume from, and what it says of the others."""
    screen = RecordingConsole()

    async def verify(directory: str) -> list[str]:
        return find_corruption(Path(directory))

    return asyncio.run(find_checkpoint(CheckpointDir(root), verify, screen)), screen.messages


def states_of(directory: Path) -> dict[str, dict[str, Any]]:
    """All tensors of a checkpoint, by folder and part."""
    states: dict[str, dict[str, Any]] = {}
    for folder in FOLDERS:
        state = states[folder] = {}
        for name, tensor in read_tensors(directory / folder):
            _put(state, name, tensor)
    return states


def loaded(directory: Path) -> dict[str, dict[str, Any]]:
    """The same by the way of a resumed run: into tensors that are there already."""
    states: dict[str, dict[str, Any]] = {}
    for folder in FOLDERS:
        state = states[folder] = {}
        for name, entry in read_index(directory / folder).tensors.items():
            _put(state, name, torch.full(entry.shape, 77, dtype=entry.dtype))
        states[folder] = load(state, directory / folder)
    return states


def _put(state: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
    part, _, rest = name.partition(".")
    if part == "rng":  # by rank
        rank, _, rest = rest.partition(".")
        state.setdefault(part, {}).setdefault(rank, {})[rest] = tensor
    else:
        state.setdefault(part, {})[rest] = tensor


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())
    return torch.equal(one, other)
