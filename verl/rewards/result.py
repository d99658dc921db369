"""The input and the result of scoring one response: a score, or a failure with its cause. A failure is never a 0."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from verl.errors import RewardError
from verl.types import Failed, FailureKind, SampleHandle, Scored, one_per_episode

_MAX_METRICS = 256
_MAX_MESSAGE_CHARS = 6000


class RewardInput(NamedTuple):
    """One response to score; the fields are the parameters of a reward function."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] | None = None


RewardResult = Scored | Failed

_FIX_FUNCTION = "Fix the function, or return an explicit score for responses it cannot grade"
_FIXES: dict[FailureKind, str] = {
    "error": _FIX_FUNCTION,
    "invalid": f"a reward must be a finite number, or a dict with a 'score' and more numbers. {_FIX_FUNCTION}",
    "timeout": "Make the function faster, or increase reward.deadline_s",
    "died": "Fix the function, or what it calls: it must return for every response",
}


def make_failure(kind: FailureKind, where: str, cause: str, request: RewardInput, fix: str = "") -> Failed:
    """Return the failure of the function `where` on one response, with the cause, the sample and a fix."""
    if len(cause) > _MAX_MESSAGE_CHARS:
        cause = f"{cause[: _MAX_MESSAGE_CHARS // 4]}\n  ...\n{cause[-_MAX_MESSAGE_CHARS * 3 // 4 :]}"
    message = (
        f"{where}: {cause.rstrip()}\n"
        f"  data_source:  {request.data_source!r}\n"
        f"  response:     {truncate(request.solution_str)}\n"
        f"  ground truth: {truncate(request.ground_truth)}\n"
        f"  {fix or _FIXES[kind]}"
    )
    return Failed(kind, message)


def format_timeout(timeout_s: float) -> str:
    return f"did not return within {timeout_s:g} s"


def parse_result(result: Any) -> tuple[float, dict[str, float], dict[str, str]]:
    """Return the score, the other finite numbers, and the entries that are not numbers.

    None and NaN mean that a sample lacks a metric: they are dropped silently.
    """
    if not isinstance(result, Mapping):
        return require_number("the score", result), {}, {}
    if "score" not in result:
        keys = ", ".join(map(str, islice(result, 20)))
        raise ValueError(f"returned a dict without 'score' (its keys: {truncate(keys)})")
    if len(result) > _MAX_METRICS:
        raise ValueError(f"returned a dict of {len(result):,} keys; at most {_MAX_METRICS} become metrics")
    metrics, skipped = {}, {}
    for key, value in result.items():
        if key == "score" or value is None:
            continue
        as_float, name = _to_float(value), str(key)[:200]
        if as_float is None or math.isinf(as_float):
            skipped[name] = truncate(value, 40)
        elif not math.isnan(as_float):
            metrics[name] = as_float
    return require_number("'score'", result["score"]), metrics, skipped


def require_number(label: str, value: Any) -> float:
    """Return `value` as a finite float, or raise a ValueError that shows what was returned as `label`."""
    as_float = _to_float(value)
    if as_float is None or not math.isfinite(as_float):
        raise ValueError(f"returned {truncate(value)} as {label}")
    return as_float


def _to_float(value: Any) -> float | None:
    """Convert numbers, bools, and numpy and torch scalars; never text."""
    if value is None or isinstance(value, str | bytes) or getattr(value, "ndim", 0) != 0:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def truncate(value: Any, limit: int = 200) -> str:
    """Return the start of a value for a message; text as a Python literal."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # noqa: BLE001 - the repr of a foreign object
        text = f"<{type(value).__name__} without a repr>"
    length = f" ... ({len(text):,} characters)" if len(text) > limit else ""
    return (repr(text[:limit]) if isinstance(value, str) else text[:limit]) + length


class FailureTracker:
    """Counts the failures of a step, and stops the run when their share exceeds the limit.

    `add` raises as soon as the limit is exceeded, not at the end of the step: a function that hangs on every response
    is detected after a few timeouts. The first failure of a step is reported at once.
    """

    def __init__(
        self, max_failure_rate: float, samples: int, report: Callable[[str], None] = lambda line: None
    ) -> None:
        self._limit, self._samples, self._report = max_failure_rate, samples, report
        self._reset()

    def _reset(self) -> None:
        self._seen = 0
        self._kinds: Counter[FailureKind] = Counter()
        self._first: Failed | None = None

    def add(self, result: RewardResult) -> None:
        """Count one result; raise a `RewardError` with the first failure of the step if the limit is exceeded."""
        self._seen += 1
        if isinstance(result, Scored):
            return
        self._kinds[result.kind] += 1
        self._first = self._first or result
        failed, samples = self._kinds.total(), max(self._samples, self._seen)
        if failed > self._limit * samples:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self._kinds.most_common())
            raise RewardError(
                f"{failed} of the {samples} responses of this step could not be scored ({kinds}), which exceeds "
                f"reward.max_failure_rate={self._limit:g}. The first failure:\n{self._first.message}"
            )
        if failed == 1:
            self._report(f"a response could not be scored; the response is discarded and counted. {result.message}")

    def keep_scored(self, handles: Iterable[SampleHandle]) -> list[SampleHandle]:
        """Count all episodes, and return the samples that have a score."""
        handles = list(handles)
        for handle in one_per_episode(handles):
            self.add(handle.failure or Scored(handle.score))
        return [handle for handle in handles if handle.failure is None]

    def end_step(self) -> dict[str, float]:
        """Return the failure rates of the step as metrics, and reset the counts."""
        seen, timeouts, failed = max(1, self._seen), self._kinds["timeout"], self._kinds.total()
        self._reset()
        return {"reward/error_rate": (failed - timeouts) / seen, "reward/timeout_rate": timeouts / seen}
