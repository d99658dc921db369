"""Files in shared memory, for a child process that cannot see the object store; removed even after a crash."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "verl-weights-"


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Create a folder for the duration of the context; this process holds a lock on it as long as it lives."""
    with tempfile.TemporaryDirectory(dir=_memory_dir(), prefix=f"{PREFIX}{os.getpid()}-") as folder:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(folder)
        finally:
            os.close(descriptor)


def remove_stale() -> None:
    """Delete folders that killed processes of this user have left: they would hold memory until the next boot."""
    for folder in _memory_dir().glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process removes it too
            if folder.lstat().st_uid == os.getuid() and not _is_used(folder):
                shutil.rmtree(folder)


def _is_used(folder: Path) -> bool:
    """Return whether its process is visible, or, in another container, still holds the lock."""
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


def _memory_dir() -> Path:
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())
