"""Reward failures of a training step: counting them, and stopping the run when there are too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from verl.errors import RewardError
from verl.rewards.result import RewardResult
from verl.types import Failed, FailureKind, SampleHandle, Scored


class FailureTracker:
    """Counts the failures of a step, and stops the run when their share exceeds the limit.

    `add` raises as soon as the limit is exceeded, not at the end of the step: a function that hangs on every response
    is detected after a few deadlines. The first failure of a step is reported at once.

    >>> tracker = FailureTracker(max_failure_rate=0.5, samples=2)
    >>> tracker.add(Scored(1.0)), tracker.add(Failed("timeout", "my_reward.py: gave no score within 5 s"))
    (None, None)
    >>> tracker.end_step()
    {'reward/error_rate': 0.0, 'reward/timeout_rate': 0.5}
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
            self._report(f"a response could not be scored; it is left out and counted. {result.message}")

    def keep_scored(self, handles: Iterable[SampleHandle]) -> list[SampleHandle]:
        """Count all samples, and return those that have a score."""
        handles = list(handles)
        for handle in handles:
            self.add(handle.failure or Scored(handle.score))
        return [handle for handle in handles if handle.failure is None]

    def end_step(self) -> dict[str, float]:
        """Return the failure rates of the step as metrics, and reset the counts."""
        seen, timeouts, failed = max(1, self._seen), self._kinds["timeout"], self._kinds.total()
        self._reset()
        return {"reward/error_rate": (failed - timeouts) / seen, "reward/timeout_rate": timeouts / seen}
