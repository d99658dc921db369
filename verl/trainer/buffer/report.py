"""The groups that a step takes, and their metrics, warnings and errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from verl.config.schema.algorithm import FilterGroupsConfig
from verl.errors import DataError, ProcessLostError, RewardError
from verl.trainer.buffer.groups import Group

MAX_DROPPED = 100  # prompts for each one of a batch; with more the data does not fit the settings
LONG_SEARCH = 10  # batches without enough groups that have signal, before the first warning

_FIX = (
    "Use prompts that the model solves sometimes (data.train_files), sample more or more varied responses to each "
    "(actor_rollout_ref.rollout.n, actor_rollout_ref.rollout.temperature), compare another metric "
    "(algorithm.filter_groups.metric), or search longer (algorithm.filter_groups.max_num_gen_batches)"
)


class Take:
    """The groups of one step: how many are wanted (`count`), and the groups that were selected, rejected or dropped.

    `warn` is called while a search lasts; `metrics` and `warnings` are complete after `finish`.
    """

    def __init__(self, count: int, signal: FilterGroupsConfig | None, warn: Callable[[str], None]) -> None:
        self.count, self._signal, self._warn = count, signal, warn
        self._bound = count * signal.max_num_gen_batches if signal and signal.max_num_gen_batches else sys.maxsize
        self._next_warning = LONG_SEARCH * count
        self.selected: list[Group] = []  # all, in the order of the selection
        self.trained: list[Group] = []
        self._rejected: list[Group] = []  # without signal
        self.dropped = 0  # prompts
        self._discarded = 0  # samples
        self.metrics: dict[str, float] = {}
        self.warnings: list[str] = []

    @property
    def _generated(self) -> int:
        """The number of groups that were looked at."""
        return len(self.trained) + len(self._rejected)

    @property
    def missing(self) -> int:
        """The number of groups to select next; 0 at the end."""
        return min(self.count - len(self.trained), self._bound - self._generated)

    def add(self, groups: Iterable[Group]) -> None:
        """Add groups; warn if the search takes long, raise if nearly all prompts are dropped."""
        for group in groups:
            self._discarded += group.discard_unverified()
            self.selected.append(group)
            if group.is_dropped:
                self.dropped += 1
            else:
                (self.trained if group.has_signal else self._rejected).append(group)
        if self.dropped > MAX_DROPPED * self.count:
            raise DataError(
                f"{self.dropped:,} of the last {self.dropped + self._generated:,} prompts are longer than "
                "data.max_prompt_length and were dropped; increase it, or fix data.train_files"
            )
        if self._next_warning <= self._generated and self.missing > 0:
            self._next_warning *= 2
            self._warn(f"{self._describe_search()}. The search continues. {_FIX}")

    def finish(self, position: int, *, has_dropped: bool) -> None:
        """Set metrics and warnings; raise if there is nothing to train on.

        Args:
            position: The position of the next group.
            has_dropped: Whether an earlier step has dropped prompts: there is a warning once, then a metric.
        """
        samples = sum(len(group.samples) for group in self.trained)
        if self._discarded:
            if not samples:
                raise ProcessLostError("all samples of this step are of rollout engines that were not verified")
            self.metrics["faults/samples_discarded"] = float(self._discarded)
            self.warnings.append(f"{self._discarded:,} samples of rollout engines that were not verified are discarded")
        if self._signal is not None:
            self._report_search(position)
        if self.dropped and not has_dropped:
            self.warnings.append(
                f"{self.dropped:,} of {self.dropped + self._generated:,} prompts are longer than "
                "data.max_prompt_length and were dropped (data.filter_overlong_prompts=True); the next prompts replace "
                "them. From now on data/prompts_dropped counts them for each step"
            )
        if self.dropped or has_dropped:
            self.metrics["data/prompts_dropped"] = float(self.dropped)
        if not samples:
            raise RewardError(
                f"none of the responses to {len(self.trained)} prompts could be scored: there is nothing to train on. "
                "Fix the reward function (reward.max_failure_rate allows this many failures)"
            )

    def _report_search(self, position: int) -> None:
        self.metrics |= {
            "sampling/groups_generated": float(self._generated),
            "sampling/groups_dropped": float(len(self._rejected)),
            "sampling/gen_batches": self._generated / self.count,
        }
        if self._rejected:
            self.metrics["sampling/dropped_score_mean"] = self._mean_rejected_score()
        if len(self.trained) == self.count:
            return
        search = self._describe_search()
        if not self.trained:
            first = position - self._generated
            raise RewardError(f"{search}. Their prompts are {first} to {position - 1} of the stream. {_FIX}")
        self.warnings.append(f"{search}. The step trains on the smaller batch. {_FIX}")

    def _describe_search(self) -> str:
        has_bound = self._bound < sys.maxsize
        bound = f"at most {self._bound // self.count} batches are searched" if has_bound else "searched without a bound"
        return (
            f"dynamic sampling: {len(self.trained)} of {self._generated:,} groups have different scores, "
            f"{self.count:,} are needed ({bound}); the mean score of the others is {self._mean_rejected_score():.3g}"
        )

    def _mean_rejected_score(self) -> float:
        scores = [sample.score for group in self._rejected for sample in group.episodes]
        return sum(scores) / max(len(scores), 1)
