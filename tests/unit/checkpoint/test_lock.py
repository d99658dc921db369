"""The lock on the folder of a run."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from verl.checkpoint import lock
from verl.checkpoint.lock import check_run, run_lock
from verl.errors import CheckpointError

pytestmark = pytest.mark.unit


class Sleeping:
    """Seconds that somebody waited, without waiting."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def __call__(self, seconds: float) -> None:
        self.seconds += seconds


async def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    messages: list[str] = []
    sleep = Sleeping()
    async with run_lock(tmp_path / "run", messages.append):
        with pytest.raises(CheckpointError) as raised:
            async with run_lock(tmp_path / "run", messages.append, sleep):
                pytest.fail("two at a time")
    words = str(raised.value)
    assert f"{tmp_path}/run: another run uses this folder: on {socket.gethostname()}, process " in words
    assert f"process {os.getpid()}, since 20" in words
    assert "trainer.experiment_name" in words
    assert sleep.seconds == lock.LOCAL_TIMEOUT_S
    assert [line.partition(" is used")[0] for line in messages] == [f"{tmp_path}/run"]


async def test_consecutive_runs_do_not_wait_for_each_other(tmp_path: Path) -> None:
    for _ in range(3):
        async with run_lock(tmp_path, pytest.fail):
            pass


async def test_a_failed_run_removes_its_lock_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at start"):
        async with run_lock(tmp_path, pytest.fail):
            raise ValueError("fails at start")
    assert list(tmp_path.iterdir()) == []


async def test_a_lock_file_that_was_removed_while_waiting_for_it_is_not_taken(tmp_path: Path) -> None:
    async with AsyncExitStack() as first, AsyncExitStack() as second, AsyncExitStack() as third:
        await first.enter_async_context(run_lock(tmp_path, pytest.fail))

        async def others_come_first(_: float) -> None:
            await first.aclose()
            await third.enter_async_context(run_lock(tmp_path, pytest.fail))

        with pytest.raises(CheckpointError, match="another run"):
            await second.enter_async_context(run_lock(tmp_path, lambda _: None, _once(others_come_first)))


def _once(first: Callable[[float], Awaitable[None]]) -> Callable[[float], Awaitable[None]]:
    calls = iter([first])

    async def sleep(seconds: float) -> None:
        await next(calls, Sleeping())(seconds)

    return sleep


async def test_a_run_started_right_after_a_killed_one_waits_for_its_lock(tmp_path: Path) -> None:
    async with AsyncExitStack() as killed, AsyncExitStack() as next_one:
        await killed.enter_async_context(run_lock(tmp_path, pytest.fail))
        sleep = Sleeping()

        async def ends(seconds: float) -> None:
            await sleep(seconds)
            await killed.aclose()

        messages: list[str] = []
        await next_one.enter_async_context(run_lock(tmp_path, messages.append, ends))
        assert sleep.seconds == lock.POLL_S
        assert len(messages) == 1


async def test_another_machine_may_have_died_and_is_waited_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_lock(tmp_path, pytest.fail):
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        sleep = Sleeping()
        with pytest.raises(CheckpointError, match="another run"):
            async with run_lock(tmp_path, print, sleep):
                pytest.fail("two at a time")
        assert sleep.seconds == lock.REMOTE_TIMEOUT_S


@pytest.mark.parametrize(
    ("place", "code", "words"),
    [
        ("open", errno.EROFS, "is not locked against a second run"),
        ("flock", errno.ENOLCK, "does not support locks"),
        ("flock", errno.ENOTSUP, "does not support locks"),
        ("flock", errno.ENOSYS, "does not support locks"),
    ],
)
async def test_without_support_for_locks_the_run_says_so_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: int, words: str
) -> None:
    def fails(*args: Any) -> Any:
        raise OSError(code, "not here")

    monkeypatch.setattr(*{"open": (os, "open"), "flock": (fcntl, "flock")}[place], fails)
    messages: list[str] = []
    async with run_lock(tmp_path, messages.append) as first, run_lock(tmp_path, messages.append) as second:
        assert first != second
    assert [words in message for message in messages] == [True, True]


async def test_without_locks_the_run_that_started_first_stops_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise OSError(errno.ENOLCK, "not here")

    monkeypatch.setattr(fcntl, "flock", fails)
    async with run_lock(tmp_path, print) as first, run_lock(tmp_path, print) as second:
        check_run(tmp_path, second)
        with pytest.raises(
            CheckpointError, match=rf"another run has taken .* process {os.getpid()}, since 20.*default_local_dir"
        ):
            check_run(tmp_path, first)


async def test_a_run_that_ends_by_an_error_leaves_the_folder_to_others(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of the run"):
        async with run_lock(tmp_path, pytest.fail):
            raise ValueError("of the run")
    async with run_lock(tmp_path, pytest.fail):
        pass


async def test_the_folder_and_the_lock_file_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with run_lock(tmp_path / "project" / "run", pytest.fail):
            assert (tmp_path / "project" / "run").stat().st_mode & 0o777 == 0o700
            assert (tmp_path / "project" / "run" / lock.LOCK).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


async def test_a_lock_file_of_an_older_version_is_made_private(tmp_path: Path) -> None:
    (tmp_path / lock.LOCK).touch(mode=0o644)
    async with run_lock(tmp_path, pytest.fail):
        assert (tmp_path / lock.LOCK).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["foreign", "link", "second name", "pipe"])
async def test_a_planted_lock_file_is_refused_and_not_changed(tmp_path: Path, kind: str) -> None:
    precious, planted = tmp_path / "precious", tmp_path / "run" / lock.LOCK
    planted.parent.mkdir()
    precious.write_text("do not truncate")
    if kind == "foreign":
        if os.geteuid():
            pytest.skip("only root can make a file of another user")
        planted.touch(mode=0o666)
        os.chown(planted, 54321, 54321)
    elif kind == "link":
        planted.symlink_to(precious)
    elif kind == "second name":
        planted.hardlink_to(precious)
    else:
        os.mkfifo(planted)
    with pytest.raises(
        CheckpointError, match=r"run/\.run\.lock: (belongs to another user|is a link, or not a regular file)"
    ):
        async with run_lock(planted.parent, pytest.fail):
            pytest.fail("it ran")
    assert precious.read_text() == "do not truncate"


async def test_the_file_system_decides_who_another_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_lock(tmp_path, pytest.fail):
        (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr(os, "geteuid", lambda: 54321)  # NFS stores files of this user under another id
    async with run_lock(tmp_path, pytest.fail):
        pass


async def test_deleting_the_lock_does_not_admit_a_second_run(tmp_path: Path) -> None:
    async with run_lock(tmp_path, pytest.fail) as first:
        (tmp_path / lock.LOCK).unlink()
        with pytest.raises(CheckpointError, match="another run uses this folder"):
            async with run_lock(tmp_path, print, Sleeping()):
                pytest.fail("two at a time")
        check_run(tmp_path, first)


async def test_in_a_folder_that_others_can_open_they_cannot_block_the_run_but_a_deleted_lock_stops_it(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        async with run_lock(tmp_path, pytest.fail) as first:
            (tmp_path / lock.LOCK).unlink()
            async with run_lock(tmp_path, pytest.fail) as second:
                check_run(tmp_path, second)
                (tmp_path / "metrics.jsonl").touch()
                with pytest.raises(CheckpointError, match="another run has taken this folder over"):
                    check_run(tmp_path, first)
            with pytest.raises(CheckpointError, match="another run has taken this folder over"):
                check_run(tmp_path, first)
    finally:
        os.close(other)
