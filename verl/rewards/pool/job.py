"""Interfaces between a pool and the user code that its worker processes run.

A `Job` describes the code. The pool sends the job to every worker process, where `load` returns a `Service`, which runs
the calls. Results leave a worker as JSON, so nothing that user code made is ever unpickled outside of the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from verl.types import FailureKind

Q = TypeVar("Q")  # a request
R = TypeVar("R")  # a result
Q_in = TypeVar("Q_in", contravariant=True)


class Service(Protocol[Q_in, R]):
    """User code that is loaded in a worker process."""

    is_async: bool
    is_batched: bool
    warn: Callable[[str], None]

    def call(self, requests: Sequence[Q_in]) -> Any:
        """Return what the user code returns, or its coroutine. There is one request unless `is_batched`."""
        ...

    def to_results(self, returned: Any, requests: Sequence[Q_in]) -> list[R]:
        """Convert what `call` returned, one result per request."""
        ...

    def to_failures(self, error: BaseException, requests: Sequence[Q_in]) -> Sequence[R]:
        """Return the results of a call that raised."""
        ...


class Job(Protocol[Q_in, R]):
    """Picklable description of the user code that a pool runs."""

    @property
    def label(self) -> str:
        """The name of the code in messages."""
        ...

    @property
    def batch_size(self) -> int | None:
        """The most requests in one call; None if every call has one request."""
        ...

    @property
    def is_repeatable(self) -> bool:
        """Whether a call may be made again after its process was killed from outside."""
        ...

    def load(self) -> Service[Q_in, R]:
        """Load the code, in a worker process. Raises `RewardError` with a message for the user."""
        ...

    def fail(self, kind: FailureKind, cause: str, request: Q_in) -> R:
        """Return the result of a call that timed out or ended its process."""
        ...

    def encode(self, result: R) -> dict[str, Any]:
        """Return a result as JSON, in a worker process."""
        ...

    def decode(self, message: dict[str, Any]) -> R:
        """Return the result that `encode` has written. Raises `KeyError`, `TypeError` or `ValueError` for others."""
        ...
