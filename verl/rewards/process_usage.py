"""Reads the descendants of a process from /proc, with the memory and disk space that they use, and kills them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_PAGE = resource.getpagesize()
_MAX_FILES = 10_000  # each costs kernel memory, which no limit on bytes counts
_MAX_DEPTH = 100  # nesting of folders
_SOCKET_BYTES = 2 * 212_992  # what a program may set the buffer of a socket to
_WRITABLE = ("/tmp", "/dev/shm")


def list_descendants(pid: int) -> list[int]:
    """Return all processes below `pid`, its children first; none on systems other than Linux."""
    pids = [pid]
    for parent in pids:  # grows during the loop
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


def socket_bytes(pid: int) -> int:
    """Return the most kernel memory that the sockets of a process can hold, which no limit on memory counts."""
    return sum(_SOCKET_BYTES for path, target in _list_open_files(pid) if target.startswith("socket:"))


def exceeds_disk(pids: Sequence[int], folder: str | None, limit_bytes: int) -> bool:
    """Return whether processes wrote too many files or bytes to `folder` or, without one, too many files to a tmpfs.

    The kernel limits the bytes of a tmpfs itself. A process that hides its files exceeds the limit.
    """
    if any(map(_is_hidden, pids)):
        return True
    if folder is None:
        return any(_count_files(f"/proc/{pid}/root{path}") > _MAX_FILES for pid in pids for path in _WRITABLE)
    total = sum(_deleted_bytes(pid) for pid in pids)
    count = 0
    for path, folders, names in os.walk(folder):
        count += len(folders) + len(names)
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
        if total > limit_bytes or count > _MAX_FILES or path.count("/") > _MAX_DEPTH:
            return True
    return total > limit_bytes


def _is_hidden(pid: int) -> bool:
    """Return whether a process made itself invisible to this user. An exiting process has no memory."""
    try:
        os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return resident_bytes(pid) > 0
    except OSError:
        pass
    return False


def _deleted_bytes(pid: int) -> int:
    """Return the bytes of deleted files that a process holds open."""
    total = 0
    for path, target in _list_open_files(pid):
        with contextlib.suppress(OSError):
            total += os.stat(path).st_blocks * 512 if target.endswith(" (deleted)") else 0
    return total


def _list_open_files(pid: int) -> Iterator[tuple[str, str]]:
    """Yield the path below /proc and the name of each file that a process has open."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError):
                yield path, os.readlink(path)


def _count_files(folder: str) -> int:
    with contextlib.suppress(OSError):
        system = os.statvfs(folder)
        return system.f_files - system.f_ffree
    return 0
