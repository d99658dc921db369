"""Records the steps that `trainer.replay.steps` names, so that `verl replay` can run them again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from verl.data.plan import Plan
from verl.errors import CheckpointError
from verl.tracking.console import Console

if TYPE_CHECKING:  # imports Ray, which a replay does not have
    from verl.workers.train import PolicyGroup

RESULT = "result.json"


def get_step_folder(run: Path, step: int) -> Path:
    """Return where a step is recorded in a run's folder: `replay/step_00000003`."""
    return run / "replay" / f"step_{step:08d}"


class StepRecorder:
    """Has the train workers write some steps of a run. A step that cannot be written is trained all the same."""

    def __init__(self, run: Path, steps: Collection[int], policy: PolicyGroup, console: Console) -> None:
        self._run, self._steps, self._policy, self._console = run, frozenset(steps), policy, console
        self._writing: Path | None = None  # complete but for the result

    async def begin(self, step: int, plan: Plan) -> None:
        """Write the models and the samples before a step, if it is to be recorded."""
        self._writing = None
        if step not in self._steps:
            return
        folder = get_step_folder(self._run, step)
        writing = folder.with_name(f".{folder.name}")
        try:
            shutil.rmtree(writing, ignore_errors=True)  # left by a kill
            await self._policy.record_step(plan, str(writing.absolute()))
            self._writing = writing
        except (CheckpointError, OSError) as error:
            self._report(step, error)

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of the step; from now on it can be replayed."""
        if self._writing is None:
            return
        folder = get_step_folder(self._run, step)
        try:
            (self._writing / RESULT).write_text(json.dumps({"step": step, "metrics": dict(metrics)}), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)  # the run has gone back behind it
            os.replace(self._writing, folder)
        except OSError as error:
            return self._report(step, error)
        self._console.note(f"recorded step {step}: verl replay {self._run} --step {step}")

    def _report(self, step: int, error: Exception) -> None:
        self._console.advice(f"step {step} was not recorded for a replay; training continues: {error}")
