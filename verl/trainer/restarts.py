"""Restarts of a run and of its engines: reported on the console, counted, and limited by the settings."""

from __future__ import annotations

from typing import TypeVar

from verl.config.schema import Config, SftConfig
from verl.config.schema.trainer import FaultsConfig
from verl.errors import ProcessLostError
from verl.rollout.supervisor import EngineEvent, EngineState
from verl.tracking.console import Console

C = TypeVar("C", Config, SftConfig)


class RestartTracker:
    """Counts the restarts of one run, whose id stays the same over all of them.

    Engines and reward workers are restarted while the run continues. A train worker, an episode worker or a machine
    takes part of the run's state with it: then all processes end, and the run restarts from its last checkpoint.
    """

    def __init__(self, console: Console, settings: FaultsConfig | None = None, run_id: str = "") -> None:
        self._console, self._settings, self.run_id = console, settings or FaultsConfig(), run_id
        self._failed_restarts = 0  # consecutive ones that were not followed by a step
        self._furthest = 0  # the highest version so far
        self._restarts = self._repeated_steps = self._engine_restarts = 0
        self._engine_seconds = 0.0

    @property
    def has_restarted(self) -> bool:
        return self._restarts > 0

    def metrics(self) -> dict[str, float]:
        """Return the counts of restarts and of what they cost; empty before the first restart."""
        counts = {
            "faults/run_restarts": self._restarts,
            "faults/steps_repeated": self._repeated_steps,
            "faults/engine_restarts": self._engine_restarts,
            "faults/engine_seconds_lost": round(self._engine_seconds, 1),
        }
        return {name: float(value) for name, value in counts.items()} if any(counts.values()) else {}

    def engine(self, event: EngineEvent) -> None:
        if event.state is EngineState.READY and event.previous is EngineState.PROBING:
            if event.joins:
                return self._console.note(f"rollout engine {event.engine_id} has joined after {event.seconds:.0f} s")
            self._engine_restarts += 1
            self._engine_seconds += event.seconds
            self._console.note(
                f"rollout engine {event.engine_id} is ready again after {event.seconds:.0f} s: restarted, brought to "
                "the current weights and probed; its requests ran again"
            )
        elif event.state in (EngineState.LOST, EngineState.GIVEN_UP):
            self._console.advice(str(event))

    def restart(self, error: ProcessLostError, version: int | None) -> None:
        """Count a restart after `error` at `version` (None: during the start); raise `error` if there are too many."""
        if version is not None and version > self._furthest:
            self._failed_restarts, self._furthest = 0, version
        self._failed_restarts += 1
        if self._failed_restarts > self._settings.max_restarts:
            raise error
        self._restarts += 1
        self._console.advice(
            f"{error}\n    restarting all processes from the last checkpoint (attempt {self._failed_restarts} of at "
            f"most trainer.faults.max_restarts={self._settings.max_restarts} in a row)"
        )

    def resumed(self, version: int) -> None:
        """Count the steps to repeat after resuming from `version`."""
        repeated = self._furthest - version
        if repeated > 0:
            self._repeated_steps += repeated
            why = "" if version else ": no checkpoint was written yet (trainer.save_freq)"
            self._console.note(f"repeating {repeated} steps{why}")


def resume_from_own(config: C) -> C:
    """Return the settings of a run that has saved: from now on it resumes from its own checkpoints."""
    trainer = config.trainer.model_copy(update={"resume_mode": "auto", "resume_from_path": None})
    return config.model_copy(update={"trainer": trainer})
