"""The groups that a step takes, and their metrics, warnings and errors."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from verl.config.schema.algorithm import FilterGroupsConfig
from verl.errors import DataError, ProcessLostError, RewardError
from verl.trainer.buffer.groups import Group
from verl.types import SampleHandle

MAX_DROPPED = 100  # prompts for each one of a batch; with more the data does not fit the settings
LONG_SEARCH = 10  # batches without enough groups that have signal, before the first warning

_FIX = (
    "Use prompts that the model solves sometimes (data.train_files), sample more or more varied responses to each "
    "(actor_rollout_ref.rollout.n, actor_rollout_ref.rollout.temperature), compare another metric "
    "(algorithm.filter_groups.metric), or search longer (algorithm.filter_groups.max_num_gen_batches)"
)


def describe_staleness(samples: Sequence[SampleHandle], version: int) -> dict[str, float]:
    """Return how many versions the samples of a step lag behind its weights, and how many versions sampled each."""
    ages = [version - sample.version for sample in samples if sample.generated]
    metrics = {"training/staleness": float(max(ages, default=0))}
    if not any(ages):
        return metrics
    spans = [sample.versions for sample in samples if sample.generated]
    return metrics | {
        "training/staleness_mean": sum(ages) / len(ages),
        "training/versions_in_response_mean": sum(spans) / len(spans),
        "training/versions_in_response_max": float(max(spans)),
    }


class IdleTimer:
    """Measures the time in which no group runs."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._running = clock, 0
        self._since, self._seconds = clock(), 0.0

    def begin(self) -> None:
        """A group starts."""
        self._running += 1
        if self._running == 1:
            self._seconds += self._clock() - self._since

    def end(self) -> None:
        """A group has finished."""
        self._running -= 1
        if self._running == 0:
            self._since = self._clock()

    def read(self) -> float:
        """Return the idle seconds since the last call."""
        now = self._clock()
        seconds = self._seconds + (0.0 if self._running else now - self._since)
        self._seconds, self._since = 0.0, now
        return seconds


class Take:
    """The groups that one step has seen: `count` are wanted, others are rejected, or their prompts dropped.

    `warn` is called while a search lasts; `metrics` and `warnings` are complete after `finish`.
    """

    def __init__(self, count: int, signal: FilterGroupsConfig | None, warn: Callable[[str], None]) -> None:
        self.count, self._signal, self._warn = count, signal, warn
        self._bound = count * signal.max_num_gen_batches if signal and signal.max_num_gen_batches else sys.maxsize
        self._next_warning = LONG_SEARCH * count
        self.trained: list[Group] = []
        self._rejected: list[Group] = []  # without signal
        self._dropped: list[Group] = []  # their prompts are too long
        self._discarded = 0  # samples
        self.metrics: dict[str, float] = {}
        self.warnings: list[str] = []

    @property
    def seen(self) -> list[Group]:
        """All groups, in the order of the stream."""
        return sorted([*self.trained, *self._rejected, *self._dropped], key=lambda group: group.position)

    @property
    def dropped(self) -> int:
        """The number of dropped prompts."""
        return len(self._dropped)

    def has_reached_bound(self, finished: int) -> bool:
        """Return whether the search ends, although only `finished` groups have signal."""
        return finished + len(self._rejected) >= self._bound

    def add_unusable(self, groups: Iterable[Group], finished: int) -> None:
        """Add groups that will not be trained, while `finished` others have signal.

        Warns if the search takes long, and raises if nearly all prompts are dropped.
        """
        for group in groups:
            self._discarded += group.discard_unverified()
            (self._dropped if group.is_dropped else self._rejected).append(group)
            generated = finished + len(self._rejected)
            if self.dropped > MAX_DROPPED * self.count:
                raise DataError(
                    f"{self.dropped:,} of the last {self.dropped + generated:,} prompts are longer than "
                    "data.max_prompt_length and were dropped; increase it, or fix data.train_files"
                )
            if self._next_warning <= generated and finished < self.count and not self.has_reached_bound(finished):
                self._next_warning *= 2
                self._warn(f"{self._describe_search(finished)}. The search continues. {_FIX}")

    def train(self, groups: Iterable[Group]) -> None:
        """Add the groups to train on."""
        for group in groups:
            self._discarded += group.discard_unverified()
            self.trained.append(group)

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
                f"{self.dropped:,} of {len(self.seen):,} prompts are longer than "
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

    def describe(self) -> dict[str, list[Any]]:
        """Return the positions of all groups, of trained ones with the first and the last version that sampled them."""
        trained = []
        for group in self.trained:
            sampled = [sample for sample in group.samples if sample.generated]
            oldest = min((sample.version for sample in sampled), default=group.version)
            newest = max((sample.version + sample.versions - 1 for sample in sampled), default=group.version)
            trained.append([group.position, oldest, newest, len(group.samples)])
        rejected, dropped = ([group.position for group in groups] for groups in (self._rejected, self._dropped))
        return {"trained": trained, "rejected": rejected, "dropped": dropped}

    def _report_search(self, position: int) -> None:
        generated = len(self.trained) + len(self._rejected)
        self.metrics |= {
            "sampling/groups_generated": float(generated),
            "sampling/groups_dropped": float(len(self._rejected)),
            "sampling/gen_batches": generated / self.count,
        }
        if self._rejected:
            self.metrics["sampling/dropped_score_mean"] = self._mean_rejected_score()
        if len(self.trained) == self.count:
            return
        search = self._describe_search(len(self.trained))
        if not self.trained:
            positions = [group.position for group in self._rejected]
            prompts = f"{min(positions)} to {max(positions)}"
            raise RewardError(f"{search}. Their prompts are {prompts} of the stream. {_FIX}")
        self.warnings.append(f"{search}. The step trains on the smaller batch. {_FIX}")

    def _describe_search(self, with_signal: int) -> str:
        has_bound = self._bound < sys.maxsize
        bound = f"at most {self._bound // self.count} batches are searched" if has_bound else "searched without a bound"
        return (
            f"dynamic sampling: {with_signal} of {with_signal + len(self._rejected):,} groups have different scores, "
            f"{self.count:,} are needed ({bound}); the mean score of the others is {self._mean_rejected_score():.3g}"
        )

    def _mean_rejected_score(self) -> float:
        scores = [sample.score for group in self._rejected for sample in group.episodes]
        return sum(scores) / max(len(scores), 1)
