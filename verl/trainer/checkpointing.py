"""Writes checkpoints in the background, one at a time, and finds the checkpoint to resume from."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from verl.checkpoint.manifest import LATEST, CheckpointDir, find_corruption
from verl.cluster.hangs.pending_calls import DEFAULT_TIMEOUTS, CallTarget, Timeout, format_report_hint, track_call
from verl.errors import CheckpointError, list_some
from verl.tracking.console import Console

if TYPE_CHECKING:
    from verl.workers.train_base import RankGroup

T = TypeVar("T")


class Checkpointer:
    """Writes checkpoints. Training waits while the state is copied, and while the previous checkpoint is still being
    written; an error in writing is raised by the next call. Each records `run`, since two runs may share one folder."""

    def __init__(
        self,
        policy: RankGroup,
        checkpoints: CheckpointDir,
        console: Console,
        *,
        run: Mapping[str, Any] | None = None,
        keep: int | None = None,
        timeout: Timeout = DEFAULT_TIMEOUTS.checkpoint,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._checkpoints, self._console, self._keep = policy, checkpoints, console, keep
        self._run = {} if run is None else {"run": run}
        self._writing: tuple[int, float] | None = None  # version, and the seconds that its copy took
        self._timeout, self._clock = timeout, clock
        self.longest_s = 0.0  # the longest save so far
        self._begun: int | None = None  # the last version that was started
        self.last: int | None = None  # the last version known to be saved

    async def save(self, version: int, trainer: Mapping[str, Any], *, is_last: bool = False) -> float:
        """Start a checkpoint of the current state; return the seconds that training waited."""
        called = self._clock()
        await self.finish()
        started = self._clock()
        directory = await self._on_disk("begin a checkpoint", lambda: self._checkpoints.begin(version))
        self._begun = version
        state = {**self._run, "save_id": self._checkpoints.save_id, **trainer}
        await self._policy.save(str(directory), state, is_last=is_last)
        ended = self._clock()
        self._writing = version, ended - started
        return ended - called

    async def poll(self) -> None:
        """If the checkpoint is written by now, report it and delete old ones."""
        await self._end(wait=False)

    async def finish(self) -> None:
        """Wait until nothing is being written."""
        await self._end(wait=True)

    async def has_saved(self) -> bool:
        """Whether this run has a complete checkpoint of its own, known from `poll` or only on disk."""
        if self.last is not None or (begun := self._begun) is None:
            return self.last is not None
        directory = self._checkpoints.step_dir(begun)
        return await self._on_disk(
            "inspect the last checkpoint",
            lambda: self._checkpoints.read_latest() == begun and not find_corruption(directory, checksums=False),
        )

    async def _on_disk(self, what: str, work: Callable[[], T]) -> T:
        return await on_disk(what, work, self._checkpoints.root, self._timeout)

    async def _end(self, *, wait: bool) -> None:
        if self._writing is None:
            return
        version, copied_s = self._writing
        try:
            written_s = await self._policy.poll_save(wait=wait)
            if written_s is None:
                return
        except BaseException:
            self._writing = None  # raise it once
            raise
        self._writing = None
        self.longest_s = max(self.longest_s, copied_s + written_s)
        self.last = version
        self._console.note(f"saved {self._checkpoints.step_dir(version)}")
        try:
            await self._on_disk("delete old checkpoints", lambda: self._checkpoints.prune(self._keep))
        except CheckpointError as error:
            self._console.advice(str(error))


async def on_disk(what: str, work: Callable[[], T], root: Path, timeout: Timeout) -> T:
    """Run `work` on the file system under `root`, with a timeout: it may hang forever.

    In a daemon thread, so that a call that hangs in the kernel does not keep the process from exiting.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            done.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    answer = asyncio.wrap_future(done)
    with track_call(what, target=CallTarget("file system"), timeout=timeout) as pending:
        while not (await asyncio.wait([answer], timeout=pending.remaining_s))[0]:
            if pending.remaining_s <= 0:
                raise CheckpointError(
                    f"Timed out after {pending.elapsed_s:.0f} s waiting for the file system of {root} ({what}). Check "
                    f"that it responds (ls {root}) and rerun the command to resume; complete checkpoints are unchanged."
                    f" Increase {timeout} if this is expected.{await format_report_hint(pending)}"
                )
    return answer.result()


async def find_checkpoint(
    source: CheckpointDir,
    verify: Callable[[str], Awaitable[list[str]]],
    console: Console,
    timeout: Timeout = DEFAULT_TIMEOUTS.checkpoint,
) -> int | None:
    """Return the step of the newest complete checkpoint, to resume from; None if there is nothing to resume.

    Checkpoints that are skipped are reported. If a run has saved and none of its checkpoints is complete, that is an
    error: starting over would overwrite what may still be repaired, or resume another run.
    """
    skipped: dict[Path, list[str]] = {}

    def skip(directory: Path, damage: list[str]) -> None:
        skipped[directory] = damage
        console.note(f"not resumed from {directory}: {list_some(damage)}")

    async def inspect(directory: Path) -> list[str]:
        return await on_disk(
            "inspect a checkpoint", lambda: find_corruption(directory, checksums=False), source.root, timeout
        )

    named, candidates, later = await on_disk(
        "list the checkpoints",
        lambda: (source.read_latest(), source.resume_candidates(), source.newer_steps()),
        source.root,
        timeout,
    )
    for step in candidates:
        directory = source.step_dir(step)
        damage = await inspect(directory) or await verify(str(directory))
        if not damage:
            for newer in map(source.step_dir, [*(other for other in candidates if other > step), *later]):
                if newer not in skipped and (damage := await inspect(newer)):
                    skip(newer, damage)  # usually left by a kill
            return step
        skip(directory, damage)
    if named is None or not (skipped or later):
        return None
    reasons = "; ".join(f"{directory.name}: {list_some(damage)}" for directory, damage in skipped.items())
    complete = [directory for directory in map(source.step_dir, later) if not await inspect(directory)]
    others = (
        f"{', '.join(directory.name for directory in complete)}: newer, so of another run, or rolled back; to resume "
        f"from there anyway, set trainer.resume_mode=path trainer.resume_from_path={complete[-1]}. "
        if complete
        else ""
    )
    raise CheckpointError(
        f"no checkpoint in {source.root} up to step {named}, which {LATEST} names, is complete: "
        f"{reasons or 'none exists'}. {others}Restore one, or start over with trainer.resume_mode=disable"
    )
