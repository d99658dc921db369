"""Data files at an address (`hf://`, `s3://`, `https://`, ...): each version is copied to this machine once.

Those of `reasoning_gym://` are generated.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from verl.data import reasoning_gym
from verl.errors import DataError
from verl.private_files import make_folder

_ADDRESS = re.compile(r"[a-z][a-z0-9+._-]*://")
_HUB = "hf://datasets/USER/NAME/FILE.parquet"


def is_remote(name: object) -> bool:
    """Return whether a name is an address such as `hf://datasets/openai/gsm8k/main/train.parquet`, not a path."""
    return isinstance(name, str) and _ADDRESS.match(name) is not None


def fetch_files(address: str, cache: Path | None = None) -> list[Path]:
    """Return local copies of the files at an address or pattern; raise `DataError` if there are none.

    A copy is made again when the file has changed. It appears under its name when it is complete, so that several
    processes can fetch the same file.
    """
    import httpx

    cache = cache or Path("~/.cache/verl/files").expanduser()
    if address.startswith(reasoning_gym.SCHEME):
        return [reasoning_gym.generate_file(address, cache)]
    system, path = _connect(address)
    try:
        names = sorted(system.glob(path)) if glob.has_magic(path) else [path]
        if not names:
            raise FileNotFoundError("the pattern matches no file")
        return [_fetch(system, name, cache) for name in names]
    except FileNotFoundError as error:
        raise DataError(
            f"data file not found: {address} does not exist ({error}). Check its name, and that you may read it; files "
            f"of the Hugging Face Hub are {_HUB}"
        ) from error
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise DataError(
            f"{address} cannot be read: {error}. Check the network and your login (hf auth login), or give a local copy"
        ) from error


def _connect(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path there."""
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(address)
    except ImportError as error:
        raise DataError(f"{address} needs a package that is not installed: {error}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{address} cannot be opened: {error}. Use a local path, or {_HUB}") from error
    return system, str(path)


def _fetch(system: Any, path: str, cache: Path) -> Path:
    """Return the copy of one file; its folder is named after the file's address and version."""
    if system.isdir(path):
        raise FileNotFoundError("it is a folder")
    version = hashlib.sha256(f"{system.unstrip_protocol(path)} {system.ukey(path)}".encode()).hexdigest()[:16]
    target = cache / version / PurePosixPath(path).name
    if not target.is_file():
        make_folder(target.parent)
        descriptor, draft = tempfile.mkstemp(prefix=".", dir=target.parent)
        os.close(descriptor)
        try:
            system.get_file(path, draft)
            os.replace(draft, target)
        finally:
            Path(draft).unlink(missing_ok=True)
    return target
