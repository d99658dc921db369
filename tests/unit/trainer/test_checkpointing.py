"""The checkpointer: one save at a time, errors at the next call, and resuming from the newest complete checkpoint."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from recording_console import RecordingConsole

from verl.checkpoint.files import write
from verl.checkpoint.manifest import CheckpointDir, find_corruption
from verl.cluster.hangs.pending_calls import PENDING_CALLS, Timeout
from verl.errors import CheckpointError
from verl.trainer.checkpointing import Checkpointer, find_checkpoint

pytestmark = pytest.mark.unit


class Writing:
    """A policy that writes one file on demand."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.done = False
        self.seconds = 0.0
        self.error: CheckpointError | None = None
        self._pending: tuple[Path, Mapping[str, Any]] | None = None

    async def save(self, directory: str, trainer: Mapping[str, Any], *, is_last: bool = False) -> None:
        assert self._pending is None, "two at a time"
        self._pending = Path(directory), trainer
        self.begun.append(int(directory.rpartition("_")[2]))

    async def poll_save(self, *, wait: bool) -> float | None:
        if not (wait or self.done):
            return None
        assert self._pending is not None
        (directory, trainer), self._pending = self._pending, None
        if self.error is not None:
            raise self.error
        CheckpointDir(directory.parent).commit(
            self.begun[-1], {"shard": write(directory / "shard", b"weights")}, trainer
        )
        return self.seconds


async def test_a_save_waits_for_the_previous_one(tmp_path: Path) -> None:
    policy, screen = Writing(), RecordingConsole()
    checkpointer = Checkpointer(policy, CheckpointDir(tmp_path), screen)
    await checkpointer.save(1, {})
    await checkpointer.poll()
    assert CheckpointDir(tmp_path).latest() is None, "it is still being written"
    await checkpointer.save(2, {})
    assert CheckpointDir(tmp_path).latest() == 1
    await checkpointer.finish()
    assert CheckpointDir(tmp_path).latest() == 2
    assert screen.messages == [f"saved {tmp_path}/global_step_1", f"saved {tmp_path}/global_step_2"]


async def test_poll_finds_a_written_checkpoint_and_deletes_the_oldest(tmp_path: Path) -> None:
    policy = Writing()
    checkpointer = Checkpointer(policy, CheckpointDir(tmp_path), RecordingConsole(), keep=1)
    policy.done = True
    for step in (1, 2, 3):
        await checkpointer.save(step, {})
        await checkpointer.poll()
        assert CheckpointDir(tmp_path).steps() == [step]


async def test_an_error_is_raised_at_the_next_opportunity_and_only_there(tmp_path: Path) -> None:
    policy = Writing()
    checkpointer = Checkpointer(policy, CheckpointDir(tmp_path), RecordingConsole())
    await checkpointer.save(1, {})
    policy.error = CheckpointError("checkpoint .../global_step_1: no space")
    with pytest.raises(CheckpointError, match="global_step_1: no space"):
        await checkpointer.save(2, {})
    await checkpointer.finish()
    assert policy.begun == [1]


class Hanging(CheckpointDir):
    """On a file system that does not answer one of its calls, until it is let go."""

    def __init__(self, root: Path, call: str) -> None:
        super().__init__(root)
        self.let_go, real = threading.Event(), getattr(self, call)
        setattr(self, call, lambda *args: self.let_go.wait() and real(*args))


A_MOMENT = Timeout(0.05, "trainer.deadlines.checkpoint")


async def test_a_save_times_out_if_the_file_system_hangs(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path, "begin")
    checkpointer = Checkpointer(Writing(), hanging, RecordingConsole(), timeout=A_MOMENT)
    with pytest.raises(
        CheckpointError, match=rf"waiting for the file system of {tmp_path} \(begin a checkpoint\).*checkpoint=0.05"
    ):
        await checkpointer.save(1, {})
    hanging.let_go.set()


async def test_a_hanging_file_system_is_named_in_the_pending_calls(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path, "begin")
    saving = asyncio.ensure_future(Checkpointer(Writing(), hanging, RecordingConsole()).save(1, {}))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    found = [(call.action, str(call.target)) for call in PENDING_CALLS.list_calls()]
    hanging.let_go.set()
    await saving
    assert found == [("begin a checkpoint", "file system")]


async def test_old_checkpoints_that_cannot_be_deleted_in_time_are_advice(tmp_path: Path) -> None:
    hanging, screen = Hanging(tmp_path, "prune"), RecordingConsole()
    checkpointer = Checkpointer(Writing(), hanging, screen)
    await checkpointer.save(1, {})
    checkpointer._timeout = A_MOMENT
    await checkpointer.finish()
    assert "(delete old checkpoints)" in screen.messages[-1]
    hanging.let_go.set()


async def test_the_search_for_a_checkpoint_times_out_if_the_file_system_hangs(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path, "resume_candidates")
    with pytest.raises(CheckpointError, match=r"\(list the checkpoints\)"):
        await find_checkpoint(hanging, verify, RecordingConsole(), A_MOMENT)
    hanging.let_go.set()


async def test_the_longest_save_is_measured_however_late_it_is_polled(tmp_path: Path) -> None:
    now = [0.0]

    class Copying(Writing):
        async def save(self, directory: str, trainer: Mapping[str, Any], *, is_last: bool = False) -> None:
            now[0] += 3.0
            await super().save(directory, trainer)

    policy = Copying()
    checkpointer = Checkpointer(policy, CheckpointDir(tmp_path), RecordingConsole(), clock=lambda: now[0])
    for step, seconds in ((1, 5.0), (2, 20.0), (3, 1.0)):
        policy.seconds = seconds
        await checkpointer.save(step, {})
        now[0] += 1800.0  # a step
        await checkpointer.finish()
    assert checkpointer.longest_s == 23.0


def saved(root: Path, *steps: int) -> CheckpointDir:
    checkpoints = CheckpointDir(root)
    for step in steps:
        directory = checkpoints.begin(step)
        checkpoints.commit(step, {"shard": write(directory / "shard", b"weights")})
    return checkpoints


async def verify(directory: str) -> list[str]:
    return find_corruption(Path(directory))


async def test_the_newest_complete_checkpoint_is_found_and_skipped_ones_are_named(tmp_path: Path) -> None:
    checkpoints, screen = saved(tmp_path, 1, 2, 3, 4), RecordingConsole()
    (tmp_path / "global_step_4" / "shard").unlink()
    (tmp_path / "global_step_3" / "shard").write_bytes(b"Weights")
    checkpoints.begin(5)
    (tmp_path / "global_step_5" / "shard").write_bytes(b"wei")
    assert await find_checkpoint(checkpoints, verify, screen) == 2
    assert screen.messages[0] == f"not resumed from {tmp_path}/global_step_4: shard is missing"
    assert screen.messages[1].startswith(
        f"not resumed from {tmp_path}/global_step_3: shard has changed: its SHA-256 is "
    )
    assert screen.messages[2:] == [f"not resumed from {tmp_path}/global_step_5: the save did not finish"]


async def test_a_run_killed_in_its_first_save_starts_over(tmp_path: Path) -> None:
    screen = RecordingConsole()
    CheckpointDir(tmp_path).begin(1)
    assert await find_checkpoint(CheckpointDir(tmp_path), verify, screen) is None
    assert screen.messages == [f"not resumed from {tmp_path}/global_step_1: the save did not finish"]


async def test_resume_fails_if_no_checkpoint_is_complete(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / f"global_step_{step}" / "shard").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint in .* up to step 2, which .* is complete: global_step_2: shard is missing; glo",
    ):
        await find_checkpoint(checkpoints, verify, RecordingConsole())


async def test_a_run_with_a_damaged_checkpoint_does_not_resume_from_another_run(tmp_path: Path) -> None:
    saved(tmp_path, 80, 90, 100)
    checkpoints = saved(tmp_path, 50)
    (tmp_path / "global_step_50" / "shard").write_bytes(b"Weights")
    checkpoints.begin(110)
    with pytest.raises(CheckpointError) as raised:
        await find_checkpoint(checkpoints, verify, RecordingConsole())
    words = str(raised.value)
    assert f"no checkpoint in {tmp_path} up to step 50, which latest_checkpointed_iteration.txt names, is comp" in words
    assert "global_step_50: shard has changed" in words
    assert "global_step_80, global_step_90, global_step_100: newer, so of another run" in words
    assert f"trainer.resume_from_path={tmp_path}/global_step_100" in words
    assert "trainer.resume_mode=disable" in words
