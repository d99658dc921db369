"""Saving and resuming as the loop sees them: one checkpoint at a time, written while training goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar

from verl.checkpoint.manifest import LATEST, CheckpointDir, find_corruption
from verl.cluster.hangs import DEFAULT_DEADLINES, CallTarget, Deadline, format_report_hint, track_call
from verl.errors import CheckpointError
from verl.tracking.console import Console

__all__ = ["Checkpointer", "SavedPolicy", "find_checkpoint"]

T = TypeVar("T")
Verify = Callable[[str], Awaitable[list[str]]]
"""The directory of a checkpoint -> what is wrong with its files."""


class SavedPolicy(Protocol):
    """The trained model over all ranks, as saving needs it."""

    async def save(self, directory: str, trainer: Mapping[str, Any]) -> None:
        """Copy all that a checkpoint holds; it is written, and committed with `trainer`, after this returns."""

    async def poll_save(self, *, wait: bool) -> float | None:
        """The seconds that writing took what `save` began, None while it goes on; raises what went wrong with it."""


class Checkpointer:
    """Owns the writing of checkpoints. The loop stands still while the state is copied, and while a former checkpoint
    is still being written; what goes wrong with one is raised by the next call."""

    def __init__(
        self,
        policy: SavedPolicy,
        checkpoints: CheckpointDir,
        console: Console,
        *,
        keep: int | None = None,
        deadline: Deadline = DEFAULT_DEADLINES.checkpoint,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._checkpoints, self._console, self._keep = policy, checkpoints, console, keep
        self._writing: tuple[int, float] | None = None  # a step, and the seconds that its copy took
        self._deadline, self._clock = deadline, clock
        self.longest_s = 0.0  # that a checkpoint took so far
        self.begun: int | None = None  # version that was last begun
        self.last: int | None = None  # version that was saved, as far as was looked

    async def save(self, version: int, trainer: Mapping[str, Any]) -> float:
        """Begin a checkpoint of the current state; the seconds that the loop stood still."""
        began = self._clock()
        await self.finish()
        started = self._clock()
        directory = await self._on_disk("begin a checkpoint", lambda: self._checkpoints.begin(version))
        self.begun = version
        await self._policy.save(str(directory), trainer)
        ended = self._clock()
        self._writing = version, ended - started
        return ended - began

    async def poll(self) -> None:
        """Whether the checkpoint is written by now; if so, say it, and delete those that are too many."""
        await self._end(wait=False)

    async def finish(self) -> None:
        """Wait until nothing is being written."""
        await self._end(wait=True)

    async def has_saved(self) -> bool:
        """Whether this run can go on from a checkpoint of its own, also from one that was written to its end while
        nobody looked."""
        if self.last is not None or (begun := self.begun) is None:
            return self.last is not None
        directory = self._checkpoints.step_dir(begun)
        return await self._on_disk(
            "look at the last checkpoint",
            lambda: self._checkpoints.read_latest() == begun and not find_corruption(directory, sums=False),
        )

    async def _on_disk(self, what: str, work: Callable[[], T]) -> T:
        return await on_disk(what, work, self._checkpoints.root, self._deadline)

    async def _end(self, *, wait: bool) -> None:
        if self._writing is None:
            return
        version, copied_s = self._writing
        try:
            written_s = await self._policy.poll_save(wait=wait)
            if written_s is None:
                return
        except BaseException:
            self._writing = None  # it is raised once
            raise
        self._writing = None
        self.longest_s = max(self.longest_s, copied_s + written_s)
        self.last = version
        self._console.note(f"saved {self._checkpoints.step_dir(version)}")
        try:
            await self._on_disk("delete old checkpoints", lambda: self._checkpoints.prune(self._keep))
        except CheckpointError as error:
            self._console.advice(str(error))


async def on_disk(what: str, work: Callable[[], T], root: Path, deadline: Deadline) -> T:
    """What `work` gives, which the file system under `root` may keep for ever: a wait with a name and a deadline.

    The thread is one that nobody joins: a call that hangs in the kernel must not keep the process from its end.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is theirs who wait
            done.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    answer = asyncio.wrap_future(done)
    with track_call(what, target=CallTarget("file system"), deadline=deadline) as pending:
        while not (await asyncio.wait([answer], timeout=pending.remaining_s))[0]:
            if pending.remaining_s <= 0:
                raise CheckpointError(
                    f"{root}: waited {pending.elapsed_s:.0f} s for the file system to {what} and gave up; see whether "
                    f"it answers (ls {root}) and start again: checkpoints that are complete are as they were. If it "
                    f"only needs longer, raise {deadline}{await format_report_hint(pending)}"
                )
    return answer.result()


async def find_checkpoint(
    source: CheckpointDir, verify: Verify, console: Console, deadline: Deadline = DEFAULT_DEADLINES.checkpoint
) -> int | None:
    """The step to resume from: the first candidate that is whole; None if there is nothing to resume.

    What is passed over is said, with what is wrong with it. If nothing is left of a run that had saved, that is an
    error: it would start anew, and write over what may still be mended, or go on from another run.
    """
    found: dict[Path, list[str]] = {}

    def pass_over(directory: Path, damage: list[str]) -> None:
        found[directory] = damage
        console.note(f"not resumed from {directory}: {_few(damage)}")

    async def look(directory: Path) -> list[str]:
        return await on_disk(
            "look at a checkpoint", lambda: find_corruption(directory, sums=False), source.root, deadline
        )

    named, candidates, later = await on_disk(
        "list the checkpoints",
        lambda: (source.read_latest(), source.resume_candidates(), source.newer_steps()),
        source.root,
        deadline,
    )
    for step in candidates:
        directory = source.step_dir(step)
        damage = await look(directory) or await verify(str(directory))
        if not damage:
            for newer in map(source.step_dir, [*(other for other in candidates if other > step), *later]):
                if newer not in found and (damage := await look(newer)):
                    pass_over(newer, damage)  # what a kill has left, as a rule
            return step
        pass_over(directory, damage)
    if named is None or not (found or later):
        return None
    harms = "; ".join(f"{directory.name}: {_few(damage)}" for directory, damage in found.items())
    whole = [directory for directory in map(source.step_dir, later) if not await look(directory)]
    others = (
        f"{', '.join(directory.name for directory in whole)}: later, so of another run, or gone back from; to go on "
        f"from there nevertheless, trainer.resume_mode=path trainer.resume_from_path={whole[-1]}. "
        if whole
        else ""
    )
    raise CheckpointError(
        f"no checkpoint in {source.root} up to step {named}, which {LATEST} names, is whole: "
        f"{harms or 'there is none'}. {others}Bring one back, or begin anew with trainer.resume_mode=disable"
    )


def _few(damage: list[str]) -> str:
    more = f", and {len(damage) - 3} more" if len(damage) > 3 else ""
    return "; ".join(damage[:3]) + more
