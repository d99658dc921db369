"""Which checkpoints there are. A checkpoint is complete or it is not there: its last file is `trainer.json`.

root/
  global_step_20/                       one directory per saved step
    actor/ ...                          shards, written by all ranks
    trainer.json                        step, data position and the like: written last, so it marks completeness
  latest_checkpointed_iteration.txt     the step to resume from; a user may write an older one into it
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.errors import CheckpointError

__all__ = ["CheckpointDir"]

PREFIX = "global_step_"
MARKER = "trainer.json"
LATEST = "latest_checkpointed_iteration.txt"


class CheckpointDir:
    """The checkpoints of one run. One process writes: `begin(n)`, then the shards into `step_dir(n)`, then `commit(n)`.

    >>> checkpoints = CheckpointDir("checkpoints/run")
    >>> save(engine.state(), checkpoints.begin(20) / "actor")
    >>> checkpoints.commit(20, {"data": {"epoch": 0, "position": 640}})
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def step_dir(self, step: int) -> Path:
        """Where the checkpoint of `step` lies, whether or not it exists."""
        return self.root / f"{PREFIX}{step}"

    def begin(self, step: int) -> Path:
        """An empty directory for `step`; what lay there before is gone."""
        directory = self.step_dir(step)
        self._remove(step)
        directory.mkdir(parents=True)
        return directory

    def commit(self, step: int, trainer: Mapping[str, Any] | None = None) -> None:
        """Declare `step` complete, with what the trainer itself must remember, and make it the one to resume from."""
        directory = self.step_dir(step)
        if not directory.is_dir():
            raise CheckpointError(f"checkpoint {directory}: cannot be committed, nothing was saved there")
        _write(directory / MARKER, json.dumps({"step": step, **(trainer or {})}, indent=2))
        _write(self.root / LATEST, str(step))

    def trainer(self, step: int) -> dict[str, Any]:
        """What was given to `commit`, and the step."""
        try:
            return dict(json.loads((self.step_dir(step) / MARKER).read_text()))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {self.step_dir(step)}: {MARKER} cannot be read ({error}), so it is not complete; "
                f"complete ones there: {', '.join(f'{PREFIX}{found}' for found in self.steps()) or 'none'}"
            ) from error

    def steps(self) -> list[int]:
        """All complete steps, oldest first."""
        numbers = (path.parent.name.removeprefix(PREFIX) for path in self.root.glob(f"{PREFIX}*/{MARKER}"))
        return sorted(int(number) for number in numbers if number.isdigit())

    def latest(self) -> int | None:
        """The step to resume from: the one named in the latest file if it is complete, else the newest complete one."""
        complete = self.steps()
        try:
            named = int((self.root / LATEST).read_text())
        except (OSError, ValueError):
            named = None
        if named in complete:
            return named
        return complete[-1] if complete else None

    def prune(self, keep: int | None) -> list[int]:
        """Delete all complete steps but the newest `keep` and the one to resume from; None keeps all."""
        if keep is None:
            return []
        if keep < 1:
            raise CheckpointError(f"prune: keep {keep} must be at least 1, or None to keep all")
        surplus = [step for step in self.steps()[:-keep] if step != self.latest()]
        for step in surplus:
            self._remove(step)
        return surplus

    def _remove(self, step: int) -> None:
        """The marker goes first, so that a removal that is interrupted leaves nothing that looks complete."""
        (self.step_dir(step) / MARKER).unlink(missing_ok=True)
        shutil.rmtree(self.step_dir(step), ignore_errors=True)


def _write(path: Path, text: str) -> None:
    """All of it or nothing, also when the machine stops."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
