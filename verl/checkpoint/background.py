"""Saving beside training: a rank copies its state to host memory, and goes on while a thread writes the copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from verl.checkpoint.files import FileChecksum
from verl.checkpoint.manifest import CheckpointDir, writing
from verl.checkpoint.save import save

__all__ = ["BackgroundWriter", "Finisher"]

Finisher = Callable[[Path], Mapping[str, FileChecksum]]
"""More files for a checkpoint whose shards are all there: its directory -> what was written, by path inside it."""

TIMEOUT = timedelta(hours=2)


class BackgroundWriter:
    """Writes checkpoints of one rank, one at a time; all ranks call a method together.

    The threads of the ranks talk over a group of their own, so that their collectives never mix with training's. Rank 0
    commits: a checkpoint is complete as soon as it is written, whoever has died meanwhile.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if dist.is_initialized() else None
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        on_device = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_device,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_device,
            )
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self.seconds = 0.0  # that the last one took, from the end of its copy

    def start(
        self,
        states: Mapping[str, dict[str, Any]],
        directory: Path,
        trainer: Mapping[str, Any],
        finishing: Iterable[Finisher] = (),
    ) -> None:
        """Returns when `states`, by folder, are copied. `directory` is what `CheckpointDir.begin` made for a step.

        Rank 0 does the `finishing` between the shards and the commit.
        """
        assert self._writing is None, "the former save has not been waited for"
        copies: dict[str, Any] = {folder: self._stager.stage(state) for folder, state in states.items()}
        self._writing = self._thread.submit(self._write, copies, directory, trainer, list(finishing))

    def poll(self, *, wait: bool) -> bool:
        """Whether nothing is being written any more; an error of the writing is raised here, once."""
        if self._writing is None:
            return True
        if not wait and not self._writing.done():
            return False
        writing, self._writing = self._writing, None
        writing.result()
        return True

    def _write(
        self,
        states: Mapping[str, dict[str, Any]],
        directory: Path,
        trainer: Mapping[str, Any],
        finishing: Iterable[Finisher],
    ) -> None:
        began = time.monotonic()
        mine: dict[str, FileChecksum] = {}
        for folder, state in states.items():
            written = save(state, directory / folder, group=self._group)
            mine |= {f"{folder}/{name}": each for name, each in written.items()}
        files = self._gathered(mine)
        if self._rank == 0:
            with writing(directory):
                for finish in finishing:
                    files |= finish(directory)
            root, step = CheckpointDir(directory.parent), int(directory.name.rpartition("_")[2])
            root.commit(step, files, trainer)
        self.seconds = time.monotonic() - began

    def _gathered(self, mine: dict[str, FileChecksum]) -> dict[str, FileChecksum]:
        """What all ranks have written, on rank 0."""
        if self._group is None:
            return mine
        parts: list[Any] | None = [None] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object(mine, parts, group=self._group)
        return {name: each for part in parts or [] for name, each in part.items()}
