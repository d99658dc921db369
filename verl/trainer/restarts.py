"""What a run loses and gets back: told on the console, counted, and tried again as often as the settings allow."""

from __future__ import annotations

from typing import TypeVar

from verl.config.schema import Config, SftConfig
from verl.config.schema.trainer import FaultsConfig
from verl.errors import ProcessLostError
from verl.rollout.supervisor import EngineEvent, EngineState
from verl.tracking.console import Console

__all__ = ["RestartTracker", "resume_from_own"]

C = TypeVar("C", Config, SftConfig)


class RestartTracker:
    """One for a whole run, over all its restarts.

    Engines and reward workers are brought back while the run goes on. A train worker, an episode worker or a machine
    takes its part of the run's state with it: then all processes end, and the run goes on from its last checkpoint.
    """

    def __init__(self, console: Console, settings: FaultsConfig | None = None) -> None:
        self._console, self._settings = console, settings or FaultsConfig()
        self._in_vain = 0  # restarts in a row that were not followed by a step
        self._furthest = 0  # version that the run has seen
        self._restarts = self._steps_again = self._engine_restarts = 0
        self._engine_seconds = 0.0

    @property
    def settings(self) -> FaultsConfig:
        return self._settings

    @property
    def has_restarted(self) -> bool:
        return self._restarts > 0

    def metrics(self) -> dict[str, float]:
        """What it all cost so far; empty as long as nothing was lost."""
        counts = {
            "faults/run_restarts": self._restarts,
            "faults/steps_repeated": self._steps_again,
            "faults/engine_restarts": self._engine_restarts,
            "faults/engine_seconds_lost": round(self._engine_seconds, 1),
        }
        return {name: float(value) for name, value in counts.items()} if any(counts.values()) else {}

    def engine(self, event: EngineEvent) -> None:
        """An engine has moved from one state to another."""
        if event.state is EngineState.READY and event.previous is EngineState.PROBING:
            self._engine_restarts += 1
            self._engine_seconds += event.seconds
            self._console.note(
                f"rollout engine {event.index} is ready again after {event.seconds:.0f} s: restarted, brought to the "
                "current weights and probed; what it was answering was asked again"
            )
        elif event.state in (EngineState.LOST, EngineState.GIVEN_UP):
            self._console.advice(str(event))

    def restart(self, error: ProcessLostError, version: int | None) -> None:
        """The run was at `version` (None: not yet up) when it lost a process; raises `error` if it is not to go on."""
        if version is not None and version > self._furthest:
            self._in_vain, self._furthest = 0, version
        self._in_vain += 1
        if self._in_vain > self._settings.max_restarts:
            raise error
        self._restarts += 1
        self._console.advice(
            f"{error}\n    all processes are started again, and the run goes on from its last checkpoint (attempt "
            f"{self._in_vain} of at most trainer.faults.max_restarts={self._settings.max_restarts} in a row)"
        )

    def resumed(self, version: int) -> None:
        """After a restart the run goes on from `version`."""
        again = self._furthest - version
        if again > 0:
            self._steps_again += again
            why = "" if version else ", since no checkpoint had been written (trainer.save_freq)"
            self._console.note(f"{again} steps are done again{why}")


def resume_from_own(config: C) -> C:
    """The settings of a run that has saved: whatever it began from, it goes on from its own checkpoints."""
    trainer = config.trainer.model_copy(update={"resume_mode": "auto", "resume_from_path": None})
    return config.model_copy(update={"trainer": trainer})
