"""Metrics, warnings and errors of the groups that a step takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verl.errors import DataError, ProcessLostError, RewardError
from verl.trainer.buffer.groups import Group, Take
from verl.trainer.buffer.signal import SignalFilter

MAX_DROPPED = 100  # prompts for each one of a batch; with more the data does not fit the settings
LONG_SEARCH = 10  # batches without enough groups that have signal, before the first warning

_FIX = (
    "Use prompts that the model solves sometimes (data.train_files), sample more or more varied responses to each "
    "(actor_rollout_ref.rollout.n, actor_rollout_ref.rollout.temperature), compare another metric "
    "(algorithm.filter_groups.metric), or search longer (algorithm.filter_groups.max_num_gen_batches)"
)


class BufferReport:
    """Reports what a buffer took. `warn` is called while a search lasts; `warnings` are those of the last step."""

    def __init__(self, signal: SignalFilter | None, warn: Callable[[str], None]) -> None:
        self._signal, self._warn = signal, warn
        self._next_warning = 0
        self._has_dropped = False
        self.metrics: dict[str, float] = {}
        self.warnings: list[str] = []

    def begin(self, take: Take) -> None:
        self._next_warning = LONG_SEARCH * take.count

    def check(self, take: Take) -> None:
        """Check a search that goes on: warn if it takes long, raise if nearly all prompts are dropped."""
        if take.dropped > MAX_DROPPED * take.count:
            raise DataError(
                f"{take.dropped:,} of the last {take.dropped + take.generated:,} prompts are longer than "
                "data.max_prompt_length and were dropped; increase it, or fix data.train_files"
            )
        if self._next_warning <= take.generated and take.missing > 0:
            self._next_warning *= 2
            self._warn(f"{self._describe_search(take)}. The search continues. {_FIX}")

    def finish(self, take: Take, position: int) -> None:
        """Set metrics and warnings; raise if there is nothing to train on. `position` is that of the next group."""
        self.metrics, self.warnings = {}, []
        samples = sum(len(group.samples) for group in take.trained)
        if take.discarded:
            if not samples:
                raise ProcessLostError("all samples of this step are of rollout engines that were not verified")
            self.metrics["faults/samples_discarded"] = float(take.discarded)
            self.warnings.append(f"{take.discarded:,} samples of rollout engines that were not verified are discarded")
        if self._signal is not None:
            self._report_search(take, position)
        self._report_dropped(take)
        if not samples:
            raise RewardError(
                f"none of the responses to {len(take.trained)} prompts could be scored: there is nothing to train on. "
                "Fix the reward function (reward.max_failure_rate allows this many failures)"
            )

    def _report_search(self, take: Take, position: int) -> None:
        self.metrics |= {
            "sampling/groups_generated": float(take.generated),
            "sampling/groups_dropped": float(len(take.rejected)),
            "sampling/gen_batches": take.generated / take.count,
        }
        if take.rejected:
            self.metrics["sampling/dropped_score_mean"] = _mean_score(take.rejected)
        if len(take.trained) == take.count:
            return
        search = self._describe_search(take)
        if not take.trained:
            first = position - take.generated
            raise RewardError(f"{search}. Their prompts are {first} to {position - 1} of the stream. {_FIX}")
        self.warnings.append(f"{search}. The step trains on the smaller batch. {_FIX}")

    def _report_dropped(self, take: Take) -> None:
        """Warn at the first dropped prompt; from then on there is a metric."""
        if take.dropped and not self._has_dropped:
            self._has_dropped = True
            self.warnings.append(
                f"{take.dropped:,} of {take.dropped + take.generated:,} prompts are longer than data.max_prompt_length "
                "and were dropped (data.filter_overlong_prompts=True); the next prompts replace them. From now on "
                "data/prompts_dropped counts them for each step"
            )
        if self._has_dropped:
            self.metrics["data/prompts_dropped"] = float(take.dropped)

    def _describe_search(self, take: Take) -> str:
        max_batches = 0 if self._signal is None else self._signal.max_batches
        bound = f"at most {max_batches} batches are searched" if max_batches else "searched without a bound"
        return (
            f"dynamic sampling: {len(take.trained)} of {take.generated:,} groups have different scores, "
            f"{take.count:,} are needed ({bound}); the mean score of the others is {_mean_score(take.rejected):.3g}"
        )


def _mean_score(groups: Sequence[Group]) -> float:
    scores = [sample.score for group in groups for sample in group.samples]
    return sum(scores) / max(len(scores), 1)
