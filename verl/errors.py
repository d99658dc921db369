"""The exceptions of verl, each for one kind of trouble; all say place, value, rule and mend.

VerlError
├── ConfigError        a setting is unknown, of the wrong type, or contradicts another
├── DataError          a data file is missing, unreadable or lacks a column
├── RewardError        the reward function cannot be loaded or failed
├── WeightSyncError    an engine does not hold the weights that the trainer sent
├── CheckpointError    a checkpoint is incomplete or does not fit
└── EngineError        an engine died, refused or did not answer in time
    └── ProcessLostError   the process behind a call is gone: its work can be done again elsewhere
        ├── NoAnswerError  it may still be there, but has not answered before its deadline
        └── SourceLostError    it was one that holds the trained weights
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineError",
    "ProcessLostError",
    "RewardError",
    "TrainerLostError",
    "VerlError",
    "WeightSyncError",
    "WorkerTimeoutError",
]


class VerlError(Exception):
    """Base of everything that verl raises on purpose: the message alone should help."""


class ConfigError(VerlError):
    """Settings that cannot be used. Carries all problems found, not only the first.

    >>> raise ConfigError(["data.train_batch_size: 0 must be at least 1"])
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        head = "1 setting is wrong:" if count == 1 else f"{count} settings are wrong:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        return type(self), (self.problems,)


class DataError(VerlError):
    """A data file is missing, unreadable, or lacks what the settings name."""


class RewardError(VerlError):
    """The reward function cannot be loaded, or failed on a sample that is named in the message."""


class WeightSyncError(VerlError):
    """After a publish, an engine does not hold the weights of the trainer."""


class CheckpointError(VerlError):
    """A checkpoint is incomplete, damaged, or does not fit the model."""


class EngineError(VerlError):
    """An engine died, refused a request, or did not answer before its deadline."""


class ProcessLostError(EngineError):
    """The process behind a call has died, or does not answer. Nothing is wrong with what it was asked to do."""


class WorkerTimeoutError(ProcessLostError):
    """The process behind a call has not answered before its deadline; nobody knows whether it ever will."""


class TrainerLostError(ProcessLostError):
    """Who holds the trained weights is gone: no engine can be brought back to them."""
