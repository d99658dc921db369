"""A lock on the folder of a run: two runs would delete each other's checkpoints."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from verl.errors import CheckpointError

LOCK = ".run.lock"
POLL_S = 1.0
LOCAL_TIMEOUT_S = 10.0
"""By then a killed process on this machine has released its lock."""
REMOTE_TIMEOUT_S = 120.0
"""A network file system keeps the lock of a dead machine until its lease expires: 90 s for NFS."""


@asynccontextmanager
async def run_lock(
    root: Path, say: Callable[[str], None], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> AsyncIterator[None]:
    """Lock the folder of a run for the duration of the context; `CheckpointError` if another run holds it.

    The operating system releases the lock when its process ends, however that ends; a run that starts right after
    waits for it. Where locks are not supported, or the folder is not writable, the run continues without.
    """
    while (descriptor := await asyncio.to_thread(_open, root)) is not None:
        try:
            await _acquire(descriptor, root, say, sleep)
            if not await asyncio.to_thread(_is_current, descriptor, root):
                continue  # its holder has removed the file in the meantime, and others lock a new one
            try:
                yield
            finally:
                with suppress(OSError):
                    os.unlink(root / LOCK)  # before the lock is released, so that no one else can hold this file
            return
        finally:
            os.close(descriptor)
    yield


async def _acquire(
    descriptor: int, root: Path, say: Callable[[str], None], sleep: Callable[[float], Awaitable[None]]
) -> None:
    waited_s = 0.0
    while not await asyncio.to_thread(_try_lock, descriptor):
        host, holder = _holder(descriptor)
        timeout_s = LOCAL_TIMEOUT_S if host == socket.gethostname() else REMOTE_TIMEOUT_S
        if waited_s >= timeout_s:
            raise CheckpointError(
                f"{root}: another run uses this folder: {holder} (it holds {LOCK}). Two runs in one folder delete each "
                "other's checkpoints. Stop the other one, or use another folder (trainer.experiment_name, "
                "trainer.default_local_dir)."
            )
        if not waited_s:
            say(f"{root} is used by another run, {holder}; waiting up to {timeout_s:.0f} s for it to end")
        waited_s += POLL_S
        await sleep(POLL_S)


def _open(root: Path) -> int | None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        return os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:  # the next write reports it better
        return None


def _try_lock(descriptor: int) -> bool:
    """Return whether this process holds the lock now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    with suppress(OSError):  # a full disk; the lock is held nevertheless
        os.ftruncate(descriptor, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        os.pwrite(descriptor, f"{socket.gethostname()}\nprocess {os.getpid()}, since {since}\n".encode(), 0)
    return True


def _is_current(descriptor: int, root: Path) -> bool:
    """Whether the locked file is still the one that others would open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(root / LOCK))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _holder(descriptor: int) -> tuple[str, str]:
    """Return the host of the lock's holder, and a description of the holder."""
    host, _, rest = os.pread(descriptor, 1000, 0).decode(errors="replace").strip().partition("\n")
    return host, f"on {host}, {rest}" if rest else "unknown holder"
