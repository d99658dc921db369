"""The exceptions of verl. Each message states what is wrong, where, and how to fix it.

VerlError
├── ConfigError                a setting is unknown, of the wrong type, or contradicts another
├── DataError                  a data file is missing, unreadable or lacks a column
├── RewardError                the reward function cannot be loaded, or failed
├── WeightSyncError            an engine does not have the weights that the trainer sent
├── CheckpointError            a checkpoint is incomplete, corrupt, or does not fit the model
├── StorageError               the object store, and the disk that it spills to, are full
├── DivergenceError            training has diverged: weights or gradients are not finite
└── EngineError                an engine died, rejected a request, or timed out
    └── ProcessLostError       the process behind a call is gone: its work can be repeated elsewhere
        ├── WorkerTimeoutError the process has not replied in time; it may still run
        ├── CorruptEngineError its numbers are impossible; it still runs
        └── TrainerLostError   the process held the trained weights
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any


def list_some(items: Collection[str], limit: int = 3, separator: str = "; ") -> str:
    """Return the first items for a message, and how many more there are.

    >>> list_some(["a", "b", "c", "d"], limit=2)
    'a; b, and 2 more'
    """
    more = f", and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(islice(items, limit)) + more


@contextmanager
def note_on_error(note: str) -> Iterator[None]:
    """Add where and when to exceptions of the block, as a note below their message; wrong settings name their place."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        error.add_note(note)
        raise


class VerlError(Exception):
    """Base class of all errors that verl raises on purpose."""


class ConfigError(VerlError):
    """Invalid settings: all problems, not only the first."""

    def __init__(self, problems: Iterable[object]) -> None:
        self.problems = [str(problem) for problem in problems]
        count = len(self.problems)
        head = "1 setting is wrong:" if count == 1 else f"{count} settings are wrong:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        return type(self), (self.problems,)


class DataError(VerlError):
    """A data file is missing, unreadable, or lacks a column that the settings name."""


class RewardError(VerlError):
    """The reward function cannot be loaded, or failed on the sample shown in the message."""


class WeightSyncError(VerlError):
    """After a weight sync, an engine does not have the weights of the trainer."""


class CheckpointError(VerlError):
    """A checkpoint is incomplete, corrupt, or does not fit the model."""


class StorageError(VerlError):
    """The object store is full, and so is the disk to which it spills."""


class DivergenceError(VerlError):
    """Training has diverged: weights, log-probs or gradients are not finite."""


class EngineError(VerlError):
    """An engine died, rejected a request, or did not reply in time."""


class ProcessLostError(EngineError):
    """The process behind a call died or does not reply. The call itself can be repeated elsewhere.

    `partial` is the `Completion` so far of a request to generate, which another engine can continue; None: nothing.
    """

    partial: Any = None


class WorkerTimeoutError(ProcessLostError):
    """The process behind a call has not replied in time; it may still run."""


class CorruptEngineError(ProcessLostError):
    """An engine returned log-probs that are not finite, or above 0. Its process still runs."""


class TrainerLostError(ProcessLostError):
    """A process that held the trained weights is gone: engines cannot be restored without it."""
