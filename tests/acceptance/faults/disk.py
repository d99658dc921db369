"""A disk that fails wherever a checkpoint is written: the former checkpoint stays whole, and the error names the path.

Every operation on files that a save makes (begin, shards, metadata, manifest, the latest file, deletion of the oldest)
is made to fail in turn: with a full disk, an I/O error and a read-only file system, once and from then on. Then with
real file systems: a tmpfs of every size from too small to large enough, and one that is mounted read-only.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _checkpoints import chosen, equal, loaded, save
from _common import finish

from verl.checkpoint.manifest import CheckpointDir, find_corruption
from verl.errors import CheckpointError

OPERATIONS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir")
ERRORS = {"full": errno.ENOSPC, "io": errno.EIO, "read-only": errno.EROFS}
OLD, NEW = 2, 3


def main() -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--short", action="store_true", help="every sixteenth place, fewer sizes; without mounts if need be"
    )
    short = parser.parse_args().short
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # thousands of saves: no disk need suffer
    with tempfile.TemporaryDirectory(prefix="verl-disk-", dir=memory) as directory:
        whole = Path(directory, "whole")
        for step in (1, OLD):
            save(whole, step, states(step))
        places = all_places(whole, Path(directory, "case"))
        for place in range(0, len(places), 16 if short else 1):
            for name, code in ERRORS.items():
                for stays in (False, True):
                    problems = injected(whole, Path(directory, "case"), place, code, stays)
                    wrong += [f"{name} at {place}, {places[place]}{' and after' * stays}: {each}" for each in problems]
                    counts[name] += 1
        mounted = real_file_systems(whole, Path(directory, "mount"), 6 if short else 60, wrong)
    for line in wrong[:20]:
        print(line)
    finish(
        "disk",
        not wrong and (short or mounted > 0),
        places=len(places),
        by_operation=dict(Counter(place.split()[0] for place in places)),
        faults=dict(counts),
        real_file_systems=mounted,
        wrong=len(wrong),
    )


def states(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        folder: {
            "model": {f"layer.{k}": torch.randn(40, 30, generator=generator) for k in range(2)},
            "schedule": {"step": torch.tensor(step)},
        }
        for folder in ("actor", "critic")
    }


def all_places(whole: Path, root: Path) -> list[str]:
    """Every operation of a save that deletes the oldest as well."""
    places: list[str] = []
    shutil.copytree(whole, root)
    with watched(lambda operation, path: places.append(f"{operation} {path}")):
        save(root, NEW, states(NEW), keep=2)
    assert CheckpointDir(root).steps() == [OLD, NEW]
    return places


def injected(whole: Path, root: Path, place: int, code: int, stays: bool) -> list[str]:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(whole, root)
    seen = 0

    def fail(operation: str, path: str) -> None:
        nonlocal seen
        seen += 1
        if seen == place + 1 or (stays and seen > place):
            raise OSError(code, os.strerror(code))

    with watched(fail):
        message = attempted(root)
    return judged(root, code, message)


def attempted(root: Path) -> str | None:
    """The message about the failure; None if there was none."""
    try:
        notes = save(root, NEW, states(NEW), keep=2).messages
    except CheckpointError as error:
        return str(error)
    return next((note for note in notes if "cannot be" in note), None)


def judged(root: Path, code: int, message: str | None) -> list[str]:
    problems = []
    if message is None:
        problems.append("no message was printed")
    elif os.strerror(code) not in message or f"{root}/" not in message:
        problems.append(f"neither cause nor path in {message!r}")
    checkpoints = CheckpointDir(root)
    if damage := find_corruption(checkpoints.step_dir(OLD)):
        problems.append(f"the former checkpoint is harmed: {damage}")
    step, _ = chosen(root)
    if step not in (OLD, NEW) or not equal(loaded(checkpoints.step_dir(step)), states(step)):
        problems.append(f"{step} would be resumed from, or other things loaded")
    if os.statvfs(root).f_flag & os.ST_RDONLY:
        return problems
    save(root, NEW + 1, states(NEW + 1), keep=1)  # the disk is well again
    if checkpoints.steps() != [NEW + 1] or any(path.name == "INCOMPLETE" for path in root.rglob("*")):
        problems.append("the next save did not repair it")
    return problems


@contextmanager
def watched(seen: Any) -> Iterator[None]:
    """`seen(operation, path)` before each operation that writes; what it raises, the operation raises."""
    real = {name: getattr(os, name) for name in OPERATIONS}
    opened: dict[int, str] = {}

    def wrapper(name: str) -> Any:
        def operation(first: Any, *args: Any, **kwargs: Any) -> Any:
            writes = name != "open" or (args and args[0] & (os.O_WRONLY | os.O_CREAT))
            if writes:
                seen(name, opened.get(first, "?") if isinstance(first, int) else str(first))
            result = real[name](first, *args, **kwargs)
            if name == "open":
                opened[result] = str(first)
            return result

        return operation

    for name in OPERATIONS:
        setattr(os, name, wrapper(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def real_file_systems(whole: Path, mount: Path, sizes: int, wrong: list[str]) -> int:
    """A tmpfs with room for the old ones and for a part of the new one; and one that becomes read-only."""
    mount.mkdir()
    page = os.sysconf("SC_PAGE_SIZE")
    room = sum(-(-path.stat().st_size // page) * page for path in whole.rglob("*") if path.is_file())
    done = 0
    for number in range(sizes):
        pages = (room + room * number // sizes) // page + 1
        if not mounted(mount, f"size={pages * page}"):
            return done
        try:
            root = mount / "run"
            shutil.copytree(whole, root)
            message = attempted(root)
            fits = CheckpointDir(root).latest() == NEW
            if not fits or message is not None:
                subprocess.run(["mount", "-o", f"remount,size={4 * room}", str(mount)], check=True)
                wrong += [f"a tmpfs of {pages} pages: {each}" for each in judged(root, errno.ENOSPC, message)]
            done += 1
        finally:
            subprocess.run(["umount", str(mount)], check=True)
    mounted(mount, f"size={4 * room}")
    try:
        root = mount / "run"
        shutil.copytree(whole, root)
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        wrong += [f"read-only: {each}" for each in judged(root, errno.EROFS, attempted(root))]
    finally:
        subprocess.run(["umount", str(mount)], check=True)
    return done + 1


def mounted(mount: Path, options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main()
