"""One run in a folder: two would delete what the other is writing."""

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

__all__ = ["run_lock"]

LOCK = ".run.lock"
POLL_S = 1.0
PATIENCE_HERE_S = 10.0
"""A process of this machine that was killed has ended by then, and its lock with it."""
PATIENCE_ELSEWHERE_S = 120.0
"""A network file system keeps the lock of a machine that died until a lease has run out: 90 s, for NFS."""


@asynccontextmanager
async def run_lock(
    root: Path, say: Callable[[str], None], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> AsyncIterator[None]:
    """Hold the folder of a run for as long as it lasts; `CheckpointError` while another run holds it.

    The lock is the system's: it goes with its process, however that ends, and whoever is started right after waits a
    moment for it. Where there are no such locks, or nothing can be written, the run goes on without.
    """
    while (descriptor := await asyncio.to_thread(_open, root)) is not None:
        try:
            await _take(descriptor, root, say, sleep)
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


async def _take(
    descriptor: int, root: Path, say: Callable[[str], None], sleep: Callable[[float], Awaitable[None]]
) -> None:
    waited_s = 0.0
    while not await asyncio.to_thread(_is_taken, descriptor):
        host, holder = _holder(descriptor)
        patience_s = PATIENCE_HERE_S if host == socket.gethostname() else PATIENCE_ELSEWHERE_S
        if waited_s >= patience_s:
            raise CheckpointError(
                f"{root}: is the folder of another run that has not ended: {holder} (it holds {LOCK} there). Two runs "
                "in one folder delete each other's checkpoints: end the other one, or give this one a folder of its "
                "own (trainer.experiment_name, trainer.default_local_dir)"
            )
        if not waited_s:
            say(f"{root} is held by another run, {holder}; waiting up to {patience_s:.0f} s for its end")
        waited_s += POLL_S
        await sleep(POLL_S)


def _open(root: Path) -> int | None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        return os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:  # whoever writes there next says so, in better words
        return None


def _is_taken(descriptor: int) -> bool:
    """Whether it is ours now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    with suppress(OSError):  # a full disk: it is held nevertheless
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
    """The machine of who holds it, and all that is known of them, in words."""
    host, _, rest = os.pread(descriptor, 1000, 0).decode(errors="replace").strip().partition("\n")
    return host, f"on {host}, {rest}" if rest else "of which nothing is known"
