"""Folders and files that other users of the machine can neither read, replace nor lock."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from verl.errors import EngineError

_PLANTED_LIMIT = 100
"""Names that are tried for the user's folder, if others have taken them."""


class ForeignFileError(PermissionError):
    """A file that another user may have planted."""


def make_folder(path: Path) -> None:
    """Create a folder that only this user can enter, with its parents. An existing one is left as it is."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def get_user_folder() -> Path:
    """Return the folder of this user in the temporary folder, for sockets, logs and caches; nobody else can enter it.

    Its name is predictable. If somebody else has taken it, another one is used.
    """
    name = f"verl-{os.getuid()}"
    for suffix in ("", *(f"-{number}" for number in range(1, _PLANTED_LIMIT))):
        folder = Path(tempfile.gettempdir(), f"{name}{suffix}")
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if is_private(folder.lstat()):
            return folder
    raise EngineError(
        f"{Path(tempfile.gettempdir(), name)}: must be a folder that only you can enter, since it holds sockets and "
        "logs. Remove it, chmod 700 it, or set TMPDIR to another folder."
    )


def is_private(status: os.stat_result) -> bool:
    """Whether this is a folder that only this user can enter."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def open_private_file(path: Path) -> int:
    """Open a file of mode 0600 for reading and writing, created if necessary; returns its descriptor.

    Raises:
        ForeignFileError: The file belongs to another user, or is not a regular file.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            pass
        try:
            check_owner(path)
            descriptor = os.open(path, flags)
        except FileNotFoundError:  # removed in the meantime
            continue
        os.fchmod(descriptor, 0o600)
        return descriptor


def create_private_file(path: Path) -> None:
    """Create an empty file of mode 0600, unless there is one; `ForeignFileError` if that is not this user's.

    It is not opened: closing it would release the locks that SQLite holds on it in this process.
    """
    with suppress(FileExistsError):
        os.mknod(path, 0o600)
    check_owner(path)


def check_owner(path: Path) -> None:
    """Raise `ForeignFileError` unless this is a regular file of this user, without other names."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise ForeignFileError(
            errno.EPERM, "is a link, or not a regular file, so another user may have put it there", str(path)
        )
    if status.st_uid != os.geteuid() and status.st_uid != _get_owner_of_new_files(path.parent):
        raise ForeignFileError(errno.EPERM, f"belongs to another user (uid {status.st_uid})", str(path))


def _get_owner_of_new_files(folder: Path) -> int:
    """Return the owner that a file of this user gets: network file systems map users (NFS: root to nobody)."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid
