"""The checkpoints of a run, and whether they are intact. Checkpoints are atomic.

root/
  global_step_20/                       one directory per saved step
    actor/ ...                          shards, written by all ranks
    trainer.json                        step, data position and other state of the trainer
    ckpt_contents.json                  the manifest: every file with size and SHA-256; written after them
    INCOMPLETE                          while the checkpoint is being written or deleted; the id of the save
  latest_checkpointed_iteration.txt     the step to resume from, written last; users may set an older one
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path, PurePosixPath
from typing import Any

from verl.checkpoint.files import (
    FileChecksum,
    add_path_to_errors,
    compute_checksum,
    make_directory,
    replace,
    suggest_disk_fix,
    sync_directory,
    write,
)
from verl.checkpoint.lock import check_run
from verl.errors import CheckpointError

PREFIX = "global_step_"
TRAINER = "trainer.json"
METADATA = "metadata.json"  # in each folder of shards
MANIFEST = "ckpt_contents.json"
MARK = "INCOMPLETE"
MARK_TEXT = "This checkpoint is being written, or the save did not finish."
LATEST = "latest_checkpointed_iteration.txt"


class CheckpointDir:
    """The checkpoints of one run. One process calls `begin(n)`, all write into `step_dir(n)`, then `commit(n)`.

    >>> checkpoints = CheckpointDir("checkpoints/run")
    >>> sums = save(engine.state(), checkpoints.begin(20) / "actor")
    >>> checkpoints.commit(20, {f"actor/{name}": each for name, each in sums.items()}, {"data": {"position": 640}})
    """

    def __init__(self, root: str | Path, run_id: str = "") -> None:
        """`run_id` is that of `run_lock`: without one, nothing checks whether another run has taken the folder over."""
        self.root, self._run_id = Path(root), run_id
        self.save_id = ""  # set by `begin`; pass it to `commit` as part of `trainer`

    def step_dir(self, step: int) -> Path:
        return self.root / f"{PREFIX}{step}"

    def begin(self, step: int) -> Path:
        """Create an empty directory for `step`, and delete what interrupted saves have left."""
        directory = self.step_dir(step)
        check_run(self.root, self._run_id)
        self.save_id = f"{self._run_id}-{secrets.token_hex(4)}"
        for leftover in {step, *(other for other in self._all() if self._is_leftover(other))}:
            self._remove(leftover)
        with map_os_errors(directory):
            make_directory(directory)
            write(directory / MARK, f"{MARK_TEXT}\n{self.save_id}\n".encode())
            sync_directory(self.root)
        return directory

    def commit(self, step: int, files: Mapping[str, FileChecksum], trainer: Mapping[str, Any] | None = None) -> None:
        """Declare `step` complete, with `files` by their paths inside it; `step` becomes the step to resume from.

        `trainer` is the state of the trainer itself. If it has a "save_id", `CheckpointError` unless the directory is
        still the one that `begin` made for this save: another run, or this one after a restart, may have replaced it.
        """
        directory, save_id = self.step_dir(step), str((trainer or {}).get("save_id", ""))
        with map_os_errors(directory):
            self._check_save(directory, save_id)
        if missing := [name for name, expected in files.items() if _size(directory / name) != expected.size]:
            raise CheckpointError(
                f"checkpoint {directory / missing[0]}: was written by a rank but is not complete here. All machines "
                "must see the same directory: set trainer.default_local_dir to one on a shared file system."
            )
        with map_os_errors(directory):
            checksum = write(directory / TRAINER, json.dumps({"step": step, **(trainer or {})}, indent=2).encode())
            for folder in {(directory / name).parent for name in files}:
                sync_directory(folder)
            contents = {
                "step": step,
                "files": {name: asdict(each) for name, each in {**files, TRAINER: checksum}.items()},
            }
            self._check_save(directory, save_id)
            write(directory / MANIFEST, json.dumps({**contents, "seal": _seal(contents)}, indent=2).encode())
            with add_path_to_errors(directory / MARK):
                (directory / MARK).unlink(missing_ok=True)
            write(self.root / LATEST, str(step).encode())

    def read_trainer_state(self, step: int) -> dict[str, Any]:
        """Return the step and the trainer's state that was passed to `commit`."""
        if damage := find_corruption(self.step_dir(step), checksums=False):
            raise CheckpointError(
                f"checkpoint {self.step_dir(step)}: {damage[0]}, so it is not complete; "
                f"complete checkpoints: {', '.join(f'{PREFIX}{other}' for other in self.steps()) or 'none'}"
            )
        try:
            return dict(json.loads((self.step_dir(step) / TRAINER).read_bytes()))
        except (ValueError, TypeError, RecursionError) as error:  # intact by its manifest, but not JSON
            raise CheckpointError(f"checkpoint {self.step_dir(step)}: {TRAINER} is damaged: {error}") from error

    def has_run(self) -> bool:
        """Return whether a run has saved here, whatever has become of its checkpoints."""
        return any(not self._is_leftover(step) for step in self._all())

    def steps(self) -> list[int]:
        """Return the complete steps, oldest first: those with a manifest and every file at its size."""
        return [step for step in self._all() if not find_corruption(self.step_dir(step), checksums=False)]

    def resume_candidates(self) -> list[int]:
        """Return the steps to try, intact or not, newest first, up to the step in the latest file."""
        latest = self.read_latest()
        return [step for step in reversed(self._all()) if latest is None or step <= latest]

    def newer_steps(self) -> list[int]:
        """Return the steps after the step in the latest file, intact or not, which are not resumed from.

        They are left from an interrupted save or an older run in this directory, or the user has rolled back.
        """
        latest = self.read_latest()
        return [step for step in self._all() if latest is not None and step > latest]

    def read_latest(self) -> int | None:
        """Return the step in the latest file; None without one."""
        try:
            return int((self.root / LATEST).read_text())
        except (OSError, ValueError):
            return None

    def latest(self) -> int | None:
        """Return the step to resume from, without reading its files: the first complete candidate."""
        return next(
            (step for step in self.resume_candidates() if not find_corruption(self.step_dir(step), checksums=False)),
            None,
        )

    def prune(self, keep: int | None) -> list[int]:
        """Delete all complete steps but the newest `keep` up to the step to resume from; return the deleted steps.

        `newer_steps` neither count nor are deleted. None keeps all.
        """
        if keep is None:
            return []
        if keep < 1:
            raise CheckpointError(f"prune: keep {keep} must be at least 1, or None to keep all")
        check_run(self.root, self._run_id)
        newer = self.newer_steps()
        surplus = [step for step in self.steps() if step not in newer][:-keep]
        for step in surplus:
            self._remove(step)
        return surplus

    def _check_save(self, directory: Path, save_id: str) -> None:
        if not save_id:
            return
        check_run(self.root, save_id.rpartition("-")[0])
        try:
            current = (directory / MARK).read_text(errors="replace").split("\n")
        except FileNotFoundError:
            current = []
        if save_id not in current:
            raise CheckpointError(
                f"checkpoint {directory}: was not committed, because this save is stale: another one has replaced or "
                f"removed the directory since (its {MARK} does not name save {save_id}). Check that only one run uses "
                f"{self.root}, and that all machines see the same directory."
            )

    def _all(self) -> list[int]:
        steps = (path.name.removeprefix(PREFIX) for path in self.root.glob(f"{PREFIX}*") if path.is_dir())
        return sorted(int(step) for step in steps if step.isdecimal())

    def _is_leftover(self, step: int) -> bool:
        """Return whether a step is left from an interrupted save or deletion; nothing else may be deleted."""
        inside = {path.name for path in self.step_dir(step).iterdir()}
        return MANIFEST not in inside and (MARK in inside or not inside - {f".{MARK}.draft"})

    def _remove(self, step: int) -> None:
        """Delete a step. The manifest becomes the mark, which goes last: an interrupted deletion is recognized."""
        directory = self.step_dir(step)
        if not directory.exists():
            return
        with map_os_errors(directory, "deleted"):
            with suppress(FileNotFoundError):
                replace(directory / MANIFEST, directory / MARK)
            for path in directory.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != MARK:
                    path.unlink()
            shutil.rmtree(directory)


def find_free_folder(folder: Path) -> Path:
    """Return the folder, or the first of folder-2, folder-3, ... in which no run has saved."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(each for each in chain([folder], numbered) if not CheckpointDir(each).has_run())


def find_corruption(directory: Path, *, checksums: bool = True, rank: int = 0, ranks: int = 1) -> list[str]:
    """Return what is wrong with a checkpoint, one message per problem; empty if it is intact.

    Checks the manifest and the sizes of all files, and with `checksums` reads every file. Each of several ranks checks
    its share of the files.
    """
    try:
        files = _read_manifest(directory)
    except FileNotFoundError:
        return [f"{'' if (directory / MARK).exists() else f'{MANIFEST} is missing: '}the save did not finish"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{MANIFEST} is damaged: {error}"]
    damage = []
    largest_first = sorted(files.items(), key=lambda item: (-item[1].size, item[0]))
    for name, expected in largest_first[rank::ranks]:
        size = _size(directory / name)
        if size is None:
            damage.append(f"{name} is missing")
        elif size != expected.size:
            damage.append(f"{name} has {size:,} bytes, {expected.size:,} were written")
        elif checksums:
            damage += _find_checksum_mismatch(directory / name, name, expected)
    return damage


def _find_checksum_mismatch(path: Path, name: str, expected: FileChecksum) -> list[str]:
    try:
        actual = compute_checksum(path)
    except OSError as error:
        return [f"{name} cannot be read: {error}"]
    if actual == expected:
        return []
    return [f"{name} has changed: its SHA-256 is {actual.sha256[:12]}..., {expected.sha256[:12]}... was written"]


def _read_manifest(directory: Path) -> dict[str, FileChecksum]:
    written = json.loads((directory / MANIFEST).read_bytes())
    contents = {"step": written["step"], "files": written["files"]}
    if written["seal"] != _seal(contents):
        raise ValueError("it has changed since it was written")
    if directory.name != f"{PREFIX}{written['step']}":
        raise ValueError(f"it belongs to step {written['step']}")
    files = {str(name): FileChecksum(int(each["size"]), str(each["sha256"])) for name, each in written["files"].items()}
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{name!r} is not inside the checkpoint")
    return files


def _seal(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


@contextmanager
def map_os_errors(directory: Path, verb: str = "written") -> Iterator[None]:
    """Raise `OSError` as `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {directory}: cannot be {verb}: {error}. {suggest_disk_fix(directory, error)}"
        ) from error
