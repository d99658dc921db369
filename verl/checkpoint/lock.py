"""A lock on the folder of a run: two runs would delete each other's checkpoints."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from verl.errors import CheckpointError
from verl.private_files import ForeignFileError, is_private, make_folder, open_private_file

LOCK = ".run.lock"
POLL_S = 1.0
LOCAL_TIMEOUT_S = 10.0
"""Longer than a killed process on this machine needs to release its lock."""
REMOTE_TIMEOUT_S = 120.0
"""A network file system keeps the lock of a dead machine until its lease expires: 90 s for NFS."""


@asynccontextmanager
async def run_lock(
    root: Path, say: Callable[[str], None], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> AsyncIterator[str]:
    """Lock the folder of a run for the duration of the context; `CheckpointError` if another run holds it.

    Yields the id of this run. The lock file names it until another run takes the folder over, and checkpoints are
    written only as long as it does: a run that lost its lock writes nothing any more (see `check_run`).

    The operating system releases the lock when its process ends, however that ends; a run that starts right after
    waits for it. Where locks are not supported, or the folder is not writable, the run says so and continues without.
    """
    run_id = secrets.token_hex(8)
    while (lock := await asyncio.to_thread(_open, root, say)) is not None:
        try:
            if not await _acquire(lock, run_id, say, sleep):
                continue  # the holder has removed the file, and others lock a new one
            try:
                yield run_id
            finally:
                await asyncio.to_thread(lock.remove_if_unused)
            return
        finally:
            lock.close()
    yield run_id


def check_run(root: Path, run_id: str) -> None:
    """Raise `CheckpointError` if another run has taken the folder over since run `run_id`, if any, locked it."""
    if not run_id:
        return
    try:
        host, description, current = _parse((root / LOCK).read_bytes())
    except FileNotFoundError:  # deleted by hand; no other run has locked the folder
        return
    except OSError as error:
        raise CheckpointError(
            f"{root / LOCK}: cannot be read ({error.strerror}), so another run may use this folder, and nothing was "
            "written. If it is not a file of yours, remove it, and rerun the command to resume."
        ) from error
    if current and current != run_id:
        raise CheckpointError(
            f"{root}: another run has taken this folder over, on {host}, {description} ({LOCK} names it), so nothing "
            "was written. This run lost its lock: the lock file was deleted, or its machine was cut off. Stop one of "
            "the two runs; rerun this one with another folder (trainer.experiment_name, trainer.default_local_dir)."
        )


class _RunLock:
    """The lock file and, if nobody else can open it, the folder: deleting the file then does not release the lock.

    Another user who could open the folder could lock it, too, and so block the run.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._file = open_private_file(root / LOCK)
        self._folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def try_acquire(self) -> bool:
        """Return whether this process holds the lock now; `OSError` if the file system has no locks."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            if is_private(os.fstat(self._folder)):
                fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            return False
        except OSError:  # NFS locks only files
            pass
        return True

    def is_current(self) -> bool:
        """Whether the locked file is still the file that other processes would open."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self.root / LOCK))
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def write(self, run_id: str) -> None:
        """Write who holds the lock, for other runs and for the workers of this one on other machines."""
        with suppress(OSError):  # a full disk; the lock is held nevertheless
            os.ftruncate(self._file, 0)
            since = time.strftime("%Y-%m-%d %H:%M:%S %z")
            os.pwrite(
                self._file, f"{socket.gethostname()}\nprocess {os.getpid()}, since {since}\n{run_id}\n".encode(), 0
            )
            os.fsync(self._file)

    def describe_holder(self) -> tuple[str, str]:
        """Return the host of the holder, and a description of the holder."""
        host, description, _ = _parse(os.pread(self._file, 1000, 0))
        return host, f"on {host}, {description}" if description else "unknown holder"

    def remove_if_unused(self) -> None:
        """Remove the file, before it is unlocked, if the run has left nothing in its folder."""
        with suppress(OSError):
            if os.listdir(self.root) == [LOCK] and self.is_current():
                os.unlink(self.root / LOCK)

    def close(self) -> None:
        os.close(self._folder)
        os.close(self._file)


def _open(root: Path, say: Callable[[str], None]) -> _RunLock | None:
    try:
        make_folder(root)
        return _RunLock(root)
    except ForeignFileError as error:
        raise CheckpointError(
            f"{error.filename}: {error.strerror}. If no other run uses this folder, remove the file and make the "
            f"folder yours alone (chmod go-w {root}), or use another folder (trainer.experiment_name, "
            "trainer.default_local_dir)."
        ) from error
    except OSError as error:  # a run that saves nothing needs no folder; one that does reports it at its first write
        say(f"{root} is not locked against a second run: {error}")
        return None


async def _acquire(
    lock: _RunLock, run_id: str, say: Callable[[str], None], sleep: Callable[[float], Awaitable[None]]
) -> bool:
    """Wait for the lock; return False if its file has been removed in the meantime."""
    waited_s = 0.0
    try:
        while not await asyncio.to_thread(lock.try_acquire):
            host, holder = lock.describe_holder()
            timeout_s = LOCAL_TIMEOUT_S if host == socket.gethostname() else REMOTE_TIMEOUT_S
            if waited_s >= timeout_s:
                raise CheckpointError(
                    f"{lock.root}: another run uses this folder: {holder} (it holds {LOCK}). Two runs in one folder "
                    "delete each other's checkpoints. Stop the other one, or use another folder "
                    "(trainer.experiment_name, trainer.default_local_dir)."
                )
            if not waited_s:
                say(f"{lock.root} is used by another run, {holder}; waiting up to {timeout_s:.0f} s for it to end")
            waited_s += POLL_S
            await sleep(POLL_S)
    except OSError as error:
        say(
            f"{lock.root}: its file system does not support locks ({error.strerror}), so a second run in this folder "
            "is not refused: make sure that there is none. The one that started first is stopped when it saves."
        )
    if not await asyncio.to_thread(lock.is_current):
        return False
    await asyncio.to_thread(lock.write, run_id)
    return True


def _parse(content: bytes) -> tuple[str, str, str]:
    """Return host, description and run id; empty where the lock file lacks them."""
    host, description, run_id, *_ = [*content.decode(errors="replace").strip().split("\n"), "", "", ""]
    return host, description, run_id
