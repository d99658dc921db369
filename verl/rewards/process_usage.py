"""The processes below another one, read from /proc: the memory and disk space that they use, and their end."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

_PAGE = resource.getpagesize()
_MAX_FILES = 10_000  # each costs kernel memory, which no limit on bytes counts
_WRITABLE = ("/tmp", "/dev/shm")


def list_descendants(pid: int) -> list[int]:
    """Return all processes below `pid`, its children first; none on systems other than Linux."""
    pids = [pid]
    for parent in pids:  # grows meanwhile
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                pids += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
    return pids[1:]


def kill_processes(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def total_memory(pids: Sequence[int]) -> int:
    """Return the bytes that processes use together, shared memory counted once; slower than `resident_bytes`."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            total += resident_bytes(pid)
    return total


def exceeds_disk(pid: int, folder: str | None, limit_bytes: int) -> bool:
    """Return whether a program wrote too many files or bytes to `folder` or, without one, too many files to its tmpfs.

    The kernel limits the bytes of a tmpfs itself.
    """
    if folder is None:
        return any(_count_files(f"/proc/{pid}/root{path}") > _MAX_FILES for path in _WRITABLE)
    total = count = 0
    for path, _, names in os.walk(folder):
        for name in names:
            count += 1
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
            if total > limit_bytes or count > _MAX_FILES:
                return True
    return False


def _count_files(folder: str) -> int:
    with contextlib.suppress(OSError):
        system = os.statvfs(folder)
        return system.f_files - system.f_ffree
    return 0
