"""Records samples of training and validation in files, in the background: a step never waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.batch_sizes import get_record_interval
from verl.config.schema import Config
from verl.data.plan import Plan
from verl.tracking.console import Console
from verl.tracking.sample_files import EPISODES, FOLDER, get_sample_file, read_episodes, read_texts
from verl.tracking.sink import Table, TableSink
from verl.types import SampleHandle
from verl.workers.sample_rows import SampleFile

ReadTokens = Callable[[Sequence[Sequence[int]]], list[Any]]
"""(indices of samples, by data rank) -> references to what was computed for their tokens."""


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """Which samples are recorded, and where.

    Args:
        folder: The folder of the run.
        interval: Every how many groups of training one is recorded; None: none.
        per_validation: How many responses of a validation are recorded.
        max_bytes: The size of all recorded samples from which on no more are recorded.
        train_dir: A folder for all responses of training, as JSON lines.
        val_dir: The same for validation.
        val_table: How many responses of a validation metric loggers show as a table.
        is_traced: Whether metric loggers get the recorded episodes of training.
        traced_groups: Those of how many prompts of a step; None: of all.
    """

    folder: Path
    interval: int | None
    per_validation: int
    max_bytes: float
    train_dir: Path | None = None
    val_dir: Path | None = None
    val_table: int = 0
    is_traced: bool = False
    traced_groups: int | None = None

    @classmethod
    def from_config(cls, config: Config) -> RecordSettings:
        trainer, trace = config.trainer, config.actor_rollout_ref.rollout.trace
        train_dir, val_dir = (
            None if folder is None else Path(folder).expanduser().absolute()
            for folder in (trainer.rollout_data_dir, trainer.validation_data_dir)
        )
        return cls(
            trainer.checkpoint_dir,
            get_record_interval(config),
            max(trainer.samples.per_step, trainer.log_val_generations),
            trainer.samples.max_gib * 2**30,
            train_dir,
            val_dir,
            val_table=trainer.log_val_generations,
            is_traced=trace.backend is not None,
            traced_groups=trace.max_samples_per_step_per_worker,
        )


class SampleRecorder:
    """Writes files of samples in the background. Skips a step if the files of an earlier one are not written yet."""

    def __init__(
        self,
        settings: RecordSettings,
        write: Callable[[SampleFile], Awaitable[int]],
        console: Console,
        tracker: TableSink | None = None,
    ) -> None:
        self._settings, self._write, self._console, self._tracker = settings, write, console, tracker
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by split
        self._has_failed = False
        self._bytes = sum(file.stat().st_size for file in (settings.folder / FOLDER).glob("*.parquet"))
        self.skipped = 0
        """Steps and validations whose samples were not recorded, because writing was too slow or failed."""

    def record_trained(self, step: int, samples: Sequence[SampleHandle], plan: Plan, read_tokens: ReadTokens) -> None:
        """Record samples of a step, between their preparation and the update."""
        if self._is_behind("train"):
            return
        rows, files = {sample.group: sample.row for sample in samples}, list[SampleFile]()
        if (interval := self._settings.interval) is not None and self._has_room():
            chosen = [[k for k, group in enumerate(rank.groups) if group % interval == 0] for rank in plan.ranks]
            refs = [[rank.refs[k] for k in indices] for rank, indices in zip(plan.ranks, chosen, strict=True)]
            parts = [part for part in zip(refs, read_tokens(chosen), strict=True) if part[0]]
            files.append(SampleFile(get_sample_file(self._settings.folder, "train", step), "train", step, rows, parts))
        if (folder := self._settings.train_dir) is not None:
            files.append(SampleFile(folder / f"{step}.jsonl", "train", step, rows, [_list_refs(samples)]))
        self._start("train", files)

    def record_validation(self, step: int, samples: Sequence[SampleHandle]) -> None:
        """Record samples of the validation after a step: always those of the same prompts."""
        if self._is_behind("val"):
            return
        rows, files = {sample.group: sample.row for sample in samples}, list[SampleFile]()
        if (responses := self._settings.per_validation) and rows and self._has_room():
            interval = -(-len(samples) // responses)
            chosen = [sample for sample in samples if sample.group % interval == 0]
            path = get_sample_file(self._settings.folder, "val", step)
            files.append(SampleFile(path, "val", step, rows, [_list_refs(chosen)]))
        if (folder := self._settings.val_dir) is not None:
            files.append(SampleFile(folder / f"{step}.jsonl", "val", step, rows, [_list_refs(samples)]))
        self._start("val", files)

    async def close(self) -> None:
        """Wait for the files that are being written."""
        await asyncio.gather(*self._tasks.values())

    def _is_behind(self, split: str) -> bool:
        is_behind = split in self._tasks and not self._tasks[split].done()
        self.skipped += is_behind
        return is_behind

    def _has_room(self) -> bool:
        return self._bytes < self._settings.max_bytes

    def _start(self, split: str, files: Sequence[SampleFile]) -> None:
        if files:
            self._tasks[split] = asyncio.create_task(self._write_files(files))

    async def _write_files(self, files: Sequence[SampleFile]) -> None:
        for file in files:
            try:
                size = await self._write(file)
                await self._show(file)
            except Exception as error:  # noqa: BLE001 - records are not worth the run
                self.skipped += 1
                if not self._has_failed:
                    self._has_failed = True
                    self._console.advice(f"{file.path}: samples were not recorded; training continues: {error}")
                continue
            if file.path.suffix == ".parquet":
                self._count(size)

    async def _show(self, file: SampleFile) -> None:
        """Pass responses to the metric loggers: of a validation as a table, of training as episodes to be traced."""
        settings = self._settings
        if self._tracker is None or file.path.suffix != ".parquet":
            return
        name, rows = "val/generations", list[dict[str, Any]]()
        if file.split == "val" and settings.val_table:
            rows = await asyncio.to_thread(read_texts, file.path, settings.val_table)
        elif file.split == "train" and settings.is_traced:
            name, rows = EPISODES, await asyncio.to_thread(read_episodes, file.path, settings.traced_groups)
        if rows:
            self._tracker.log_table(Table(name, rows), file.step)

    def _count(self, size: int) -> None:
        before, self._bytes = self._has_room(), self._bytes + size
        if before and not self._has_room():
            self._console.advice(
                f"{self._settings.folder / FOLDER} has reached {self._bytes / 2**30:.1f} GiB: no more samples are "
                "recorded; set trainer.samples.max_gib for more"
            )


def _list_refs(samples: Sequence[SampleHandle]) -> tuple[list[Any], None]:
    """Return the references of samples that could be scored: others are not stored."""
    return [sample.ref for sample in samples if sample.ref is not None], None
