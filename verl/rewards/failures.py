"""How scoring went over a step, and when it went too badly to go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from verl.errors import RewardError
from verl.rewards.result import RewardResult
from verl.types import Failed, FailureKind, SampleHandle, Scored

__all__ = ["FailureTracker"]


class FailureTracker:
    """Counts the failures of a step, and stops the run when they are too many of its samples.

    `add` raises as soon as the limit is passed, not at the end of the step: a function that hangs on every answer is
    found after a few deadlines. The first failure of a step is said at once.

    >>> tally = FailureTally(max_failure_rate=0.5, samples=2)
    >>> tally.add(Scored(1.0)), tally.add(Failed("timeout", "my_reward.py: gave no score within 5 s"))
    (None, None)
    >>> tally.end_step()
    {'reward/error_rate': 0.0, 'reward/timeout_rate': 0.5}
    """

    def __init__(self, max_failure_rate: float, samples: int, say: Callable[[str], None] = lambda line: None) -> None:
        self._limit, self._samples, self._say = max_failure_rate, samples, say
        self._begin()

    def _begin(self) -> None:
        self._seen = 0
        self._kinds: Counter[FailureKind] = Counter()
        self._first: Failed | None = None

    def add(self, outcome: RewardResult) -> None:
        """Count one more of this step; a `RewardError` with the first failure when the limit is passed."""
        self._seen += 1
        if isinstance(outcome, Scored):
            return
        self._kinds[outcome.kind] += 1
        self._first = self._first or outcome
        failed, samples = self._kinds.total(), max(self._samples, self._seen)
        if failed > self._limit * samples:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self._kinds.most_common())
            raise RewardError(
                f"{failed} of the {samples} answers of this step could not be scored ({kinds}); up to "
                f"reward.max_failure_rate={self._limit:g} of a step are left out and counted. The first:\n"
                f"{self._first.message}"
            )
        if failed == 1:
            self._say(f"an answer could not be scored; it is left out and counted. {outcome.message}")

    def keep_scored(self, handles: Iterable[SampleHandle]) -> list[SampleHandle]:
        """Those that have a score; the others are counted."""
        handles = list(handles)
        for handle in handles:
            self.add(handle.failure or Scored(handle.score))
        return [handle for handle in handles if handle.failure is None]

    def end_step(self) -> dict[str, float]:
        """The rates of the step that ends here; the next begins at nought."""
        seen, late, all_failed = max(1, self._seen), self._kinds["timeout"], self._kinds.total()
        self._begin()
        return {"reward/error_rate": (all_failed - late) / seen, "reward/timeout_rate": late / seen}
