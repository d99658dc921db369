"""Which checkpoints there are, and whether they are whole. A checkpoint is complete or it is not there.

root/
  global_step_20/                       one directory per saved step
    actor/ ...                          shards, written by all ranks
    trainer.json                        step, data position and the like
    ckpt_contents.json                  the manifest: every file, its size and SHA-256; written after all of them
    INCOMPLETE                          as long as it is written, or while it is deleted
  latest_checkpointed_iteration.txt     the step to resume from, written last; a user may write an older one into it
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from verl.checkpoint.files import FileChecksum, compute_checksum, make_directory, naming, replace, sync_directory, write
from verl.errors import CheckpointError

__all__ = ["CheckpointDir", "find_corruption", "writing"]

PREFIX = "global_step_"
TRAINER = "trainer.json"
MANIFEST = "ckpt_contents.json"
MARK = "INCOMPLETE"
LATEST = "latest_checkpointed_iteration.txt"


class CheckpointDir:
    """The checkpoints of one run. One process writes: `begin(n)`, then the shards into `step_dir(n)`, then `commit(n)`.

    >>> checkpoints = CheckpointDir("checkpoints/run")
    >>> sums = save(engine.state(), checkpoints.begin(20) / "actor")
    >>> checkpoints.commit(20, {f"actor/{name}": each for name, each in sums.items()}, {"data": {"position": 640}})
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def step_dir(self, step: int) -> Path:
        """Where the checkpoint of `step` lies, whether or not it exists."""
        return self.root / f"{PREFIX}{step}"

    def begin(self, step: int) -> Path:
        """An empty directory for `step`; what lay there before is gone, and so is what killed saves have left."""
        directory = self.step_dir(step)
        for leftover in {step, *(other for other in self._all() if self._is_leftover(other))}:
            self._remove(leftover)
        with writing(directory):
            make_directory(directory)
            write(directory / MARK, b"This checkpoint is being written, or was not written to its end.\n")
            sync_directory(self.root)
        return directory

    def commit(self, step: int, files: Mapping[str, FileChecksum], trainer: Mapping[str, Any] | None = None) -> None:
        """Declare `step` complete: these files, by their paths inside it, and what the trainer itself must remember.

        It becomes the one to resume from.
        """
        directory = self.step_dir(step)
        if missing := [name for name, wanted in files.items() if _size(directory / name) != wanted.size]:
            raise CheckpointError(
                f"checkpoint {directory / missing[0]}: was written by a rank and is not whole here; all machines must "
                "see the same directory: set trainer.default_local_dir to one on a shared file system"
            )
        with writing(directory):
            own = write(directory / TRAINER, json.dumps({"step": step, **(trainer or {})}, indent=2).encode())
            for folder in {(directory / name).parent for name in files}:
                sync_directory(folder)
            contents = {"step": step, "files": {name: asdict(each) for name, each in {**files, TRAINER: own}.items()}}
            write(directory / MANIFEST, json.dumps({**contents, "seal": _seal(contents)}, indent=2).encode())
            with naming(directory / MARK):
                (directory / MARK).unlink(missing_ok=True)
            write(self.root / LATEST, str(step).encode())

    def read_trainer_state(self, step: int) -> dict[str, Any]:
        """What was given to `commit`, and the step."""
        if damage := find_corruption(self.step_dir(step), sums=False):
            raise CheckpointError(
                f"checkpoint {self.step_dir(step)}: {damage[0]}, so it is not complete; "
                f"complete ones there: {', '.join(f'{PREFIX}{found}' for found in self.steps()) or 'none'}"
            )
        try:
            return dict(json.loads((self.step_dir(step) / TRAINER).read_bytes()))
        except (ValueError, TypeError, RecursionError) as error:  # whole by its manifest, and yet no JSON
            raise CheckpointError(f"checkpoint {self.step_dir(step)}: {TRAINER} is damaged: {error}") from error

    def steps(self) -> list[int]:
        """All complete steps, oldest first: with a manifest, and every file of it in its size."""
        return [step for step in self._all() if not find_corruption(self.step_dir(step), sums=False)]

    def resume_candidates(self) -> list[int]:
        """The steps to try, whole or not, the newest first; none after the one named in the latest file, if one is."""
        named = self.read_latest()
        return [step for step in reversed(self._all()) if named is None or step <= named]

    def newer_steps(self) -> list[int]:
        """Those after the one named in the latest file, whole or not: somebody has gone back from them, or they are of
        another run that used this directory, or a kill has left them. Nobody resumes from them unasked."""
        named = self.read_latest()
        return [step for step in self._all() if named is not None and step > named]

    def read_latest(self) -> int | None:
        """The step in the latest file."""
        try:
            return int((self.root / LATEST).read_text())
        except (OSError, ValueError):
            return None

    def latest(self) -> int | None:
        """The step to resume from, as far as can be seen without reading the files: the first complete candidate."""
        return next(
            (step for step in self.resume_candidates() if not find_corruption(self.step_dir(step), sums=False)), None
        )

    def prune(self, keep: int | None) -> list[int]:
        """Delete all complete steps but the one to resume from and the newest before it, `keep` in all; None keeps all.

        Later ones are not this run's, and neither count nor go.
        """
        if keep is None:
            return []
        if keep < 1:
            raise CheckpointError(f"prune: keep {keep} must be at least 1, or None to keep all")
        later = self.newer_steps()
        surplus = [step for step in self.steps() if step not in later][:-keep]
        for step in surplus:
            self._remove(step)
        return surplus

    def _all(self) -> list[int]:
        numbers = (path.name.removeprefix(PREFIX) for path in self.root.glob(f"{PREFIX}*") if path.is_dir())
        return sorted(int(number) for number in numbers if number.isdecimal())

    def _is_leftover(self, step: int) -> bool:
        """What a kill has left of a save or a removal; nothing else is ours to delete."""
        inside = {path.name for path in self.step_dir(step).iterdir()}
        return MANIFEST not in inside and (MARK in inside or not inside - {f".{MARK}.draft"})

    def _remove(self, step: int) -> None:
        """The manifest becomes the mark, which goes last: a removal that is interrupted is seen to be one."""
        directory = self.step_dir(step)
        if not directory.exists():
            return
        with writing(directory, "deleted"):
            with suppress(FileNotFoundError):
                replace(directory / MANIFEST, directory / MARK)
            for path in directory.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != MARK:
                    path.unlink()
            shutil.rmtree(directory)


def find_corruption(directory: Path, *, sums: bool = True, rank: int = 0, ranks: int = 1) -> list[str]:
    """What is wrong with a checkpoint, in words; empty if it is whole.

    The manifest and the sizes of all files are always looked at. With `sums` every file is read. Over several ranks
    each looks at its part of the files alone: a file system that is asked for all of them by all ranks takes long.
    """
    try:
        files = _manifest(directory)
    except FileNotFoundError:
        unfinished = (directory / MARK).exists()
        return [
            "it was not written to its end" if unfinished else f"{MANIFEST} is missing: it was not written to its end"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{MANIFEST} is damaged: {error}"]
    damage = []
    for number, (name, wanted) in enumerate(sorted(files.items(), key=lambda item: (-item[1].size, item[0]))):
        if number % ranks != rank:
            continue
        size = _size(directory / name)
        if size is None:
            damage.append(f"{name} is missing")
        elif size != wanted.size:
            damage.append(f"{name} has {size:,} bytes, {wanted.size:,} were written")
        elif sums:
            damage += _sum_damage(directory / name, name, wanted)
    return damage


def _sum_damage(path: Path, name: str, wanted: FileChecksum) -> list[str]:
    try:
        found = compute_checksum(path)
    except OSError as error:
        return [f"{name} cannot be read: {error}"]
    if found == wanted:
        return []
    return [f"{name} has changed: its SHA-256 is {found.sha256[:12]}..., {wanted.sha256[:12]}... was written"]


def _manifest(directory: Path) -> dict[str, FileChecksum]:
    written = json.loads((directory / MANIFEST).read_bytes())
    contents = {"step": written["step"], "files": written["files"]}
    if written["seal"] != _seal(contents):
        raise ValueError("it is not what was written")
    if directory.name != f"{PREFIX}{written['step']}":
        raise ValueError(f"it is that of step {written['step']}")
    files = {str(name): FileChecksum(int(each["size"]), str(each["sha256"])) for name, each in written["files"].items()}
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{name!r} does not lie in the checkpoint")
    return files


def _seal(contents: Mapping[str, Any]) -> str:
    """Of the manifest itself."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


@contextmanager
def writing(directory: Path, what: str = "written") -> Iterator[None]:
    """The system's errors become ours."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {directory}: cannot be {what}: {error}. Earlier checkpoints are as they were; "
            f"see that {directory.parent} is writable and has room, and start again"
        ) from error
