"""Files in shared memory, for a child process that sees nothing else. They go with who made them, or soon after."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["remove_stale", "shared_folder"]

PREFIX = "verl-weights-"


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that is there for a while; its maker holds a lock on it, which ends with the process."""
    with tempfile.TemporaryDirectory(dir=_place(), prefix=f"{PREFIX}{os.getpid()}-") as folder:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(folder)
        finally:
            os.close(descriptor)


def remove_stale() -> None:
    """Delete what killed processes of this user have left: a part of a model, in memory, until the next boot."""
    for folder in _place().glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody else sweeps too
            if folder.lstat().st_uid == os.getuid() and not _is_used(folder):
                shutil.rmtree(folder)


def _is_used(folder: Path) -> bool:
    """By a process that can be seen, or by one of another container, of which only the lock is seen here."""
    process = folder.name.removeprefix(PREFIX).partition("-")[0]
    if Path("/proc", process).exists():
        return True
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _place() -> Path:
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())
