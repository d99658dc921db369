"""Saving in the background: a rank copies its state to host memory, and a thread writes the copy."""

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
from verl.checkpoint.manifest import CheckpointDir, map_os_errors
from verl.checkpoint.save import save

Finisher = Callable[[Path], Mapping[str, FileChecksum]]
"""Adds files to a checkpoint whose shards are written: its directory -> checksums, by path inside it."""

TIMEOUT = timedelta(hours=2)


class BackgroundWriter:
    """Writes the checkpoints of one rank, one at a time; all ranks call each method together.

    The writing threads use a separate process group, so that their collectives never mix with those of training.
    Rank 0 commits: a written checkpoint is complete even if the controller has died.
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
        self.seconds = 0.0  # the time that the last save took after its copy

    def start(
        self,
        states: Mapping[str, dict[str, Any]],
        directory: Path,
        trainer: Mapping[str, Any],
        finishers: Iterable[Finisher] = (),
    ) -> None:
        """Copy `states`, by folder, and write them in the background to a directory made by `CheckpointDir.begin`.

        Rank 0 calls the `finishers` between the shards and the commit.
        """
        assert self._writing is None, "the previous save has not been waited for"
        copies: dict[str, Any] = {folder: self._stager.stage(state) for folder, state in states.items()}
        self._writing = self._thread.submit(self._write, copies, directory, trainer, list(finishers))

    def poll(self, *, wait: bool) -> bool:
        """Return whether no save is running; an error of the last one is raised here, once."""
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
        finishers: Iterable[Finisher],
    ) -> None:
        start = time.monotonic()
        files: dict[str, FileChecksum] = {}
        for folder, state in states.items():
            written = save(state, directory / folder, group=self._group)
            files |= {f"{folder}/{name}": each for name, each in written.items()}
        if self._rank == 0:
            with map_os_errors(directory):
                for finish in finishers:
                    files |= finish(directory)
            CheckpointDir(directory.parent).commit(int(directory.name.rpartition("_")[2]), files, trainer)
        self.seconds = time.monotonic() - start
