"""Files of a checkpoint: summed while they are written, on the disk when they are left; every error names its path.

Everything that a checkpoint writes goes through here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ChecksummedFile",
    "FileChecksum",
    "compute_checksum",
    "make_directory",
    "replace",
    "sync_directory",
    "write",
]

BLOCK = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FileChecksum:
    """What a file must be: so many bytes, with this SHA-256."""

    size: int
    sha256: str


class ChecksummedFile:
    """A new file, written in order and synced to the disk on exit; `checksum` covers what was to be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hash, self._size = hashlib.sha256(), 0
        with naming(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    @property
    def checksum(self) -> FileChecksum:
        return FileChecksum(self._size, self._hash.hexdigest())

    def write(self, data: bytes | memoryview) -> int:
        """All of it; how much it was."""
        rest = memoryview(data)
        self._hash.update(rest)
        self._size += (size := len(rest))
        with naming(self.path):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        return size

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                with naming(self.path):
                    os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def write(path: Path, data: bytes) -> FileChecksum:
    """All of it or nothing, also when the machine stops."""
    draft = path.with_name(f".{path.name}.draft")
    with ChecksummedFile(draft) as file:
        file.write(data)
    replace(draft, path)
    return file.checksum


def replace(source: Path, target: Path) -> None:
    """Rename, for good: the directory is on the disk as well."""
    with naming(target):
        os.replace(source, target)
    sync_directory(target.parent)


def make_directory(path: Path) -> None:
    """With those above it."""
    with naming(path):
        os.makedirs(path, exist_ok=True)


def sync_directory(path: Path) -> None:
    """The names in it, on the disk."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def compute_checksum(path: Path) -> FileChecksum:
    """What a file is."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return FileChecksum(size, digest.hexdigest())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """The system's errors say what, but not always where."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
