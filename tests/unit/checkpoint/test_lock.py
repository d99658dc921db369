"""One run in a folder."""

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
from verl.checkpoint.lock import run_lock
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


async def test_runs_one_after_another_do_not_meet(tmp_path: Path) -> None:
    for _ in range(3):
        async with run_lock(tmp_path, pytest.fail):
            pass


async def test_nothing_is_left_of_a_lock_after_a_run_that_failed(tmp_path: Path) -> None:
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


async def test_who_comes_right_after_a_killed_run_waits_for_its_end(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("place", ["open", "flock"])
async def test_where_there_are_no_locks_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fails(*args: Any) -> Any:
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setattr(*{"open": (os, "open"), "flock": (fcntl, "flock")}[place], fails)
    async with run_lock(tmp_path, pytest.fail), run_lock(tmp_path, pytest.fail):
        pass


async def test_a_run_that_ends_by_an_error_leaves_the_folder_to_others(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of the run"):
        async with run_lock(tmp_path, pytest.fail):
            raise ValueError("of the run")
    async with run_lock(tmp_path, pytest.fail):
        pass
