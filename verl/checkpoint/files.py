"""Durable files: checksummed while they are written, and synced to the disk. Every error names its path."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BLOCK = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FileChecksum:
    """The size and SHA-256 of a file."""

    size: int
    sha256: str


class ChecksummedFile:
    """A new file, written in order and synced to the disk on exit; `checksum` covers what was to be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hash, self._size = hashlib.sha256(), 0
        with add_path_to_errors(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    @property
    def checksum(self) -> FileChecksum:
        return FileChecksum(self._size, self._hash.hexdigest())

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        self._hash.update(rest)
        self._size += len(rest)
        with add_path_to_errors(self.path):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                with add_path_to_errors(self.path):
                    os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def write(path: Path, data: bytes) -> FileChecksum:
    """Write a file atomically, also if the machine stops; returns its checksum."""
    draft = path.with_name(f".{path.name}.draft")
    with ChecksummedFile(draft) as file:
        file.write(data)
    replace(draft, path)
    return file.checksum


def replace(source: Path, target: Path) -> None:
    """Rename durably: the directory is synced, too."""
    with add_path_to_errors(target):
        os.replace(source, target)
    sync_directory(target.parent)


def make_directory(path: Path) -> None:
    with add_path_to_errors(path):
        os.makedirs(path, exist_ok=True)


def sync_directory(path: Path) -> None:
    """Sync the names in a directory to the disk."""
    with add_path_to_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def compute_checksum(path: Path) -> FileChecksum:
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return FileChecksum(size, digest.hexdigest())


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Add the path to an `OSError` that lacks one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def suggest_disk_fix(directory: Path, error: OSError) -> str:
    """Return what to do about a checkpoint directory that cannot be written, for the end of a message."""
    fix = f"Check that {directory.parent} is writable and has space"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = f"Free space on the disk of {directory.parent}: delete old checkpoints, and set trainer.max_ckpts_to_keep"
    return f"Earlier checkpoints are intact. {fix}, and rerun the command to resume."
