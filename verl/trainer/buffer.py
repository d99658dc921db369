"""Runs groups of episodes ahead of training, never more of them than the allowed staleness permits."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.data.samplers import PromptStream
from verl.errors import ConfigError, DataError, ProcessLostError, RewardError, WeightSyncError
from verl.types import SampleHandle

RunGroup = Callable[[int, int], Awaitable[list[SampleHandle] | None]]
"""(position in the data stream, row of the data) -> the finished samples of that prompt; None: it is dropped."""

HasSignal = Callable[[list[SampleHandle]], bool]
"""The finished samples of one prompt -> whether they differ, so that there is something to learn from them."""

MAX_DROPPED = 100  # for each prompt of a batch; with more the data does not fit the settings
LONG_SEARCH = 10  # batches without enough groups that have signal, before the first warning

_SCORE_NAMES = ("score", "seq_reward", "acc")  # acc: also of rewards that return only a number
_FIX = (
    "Use prompts that the model solves sometimes (data.train_files), sample more or more varied responses to each "
    "(actor_rollout_ref.rollout.n, actor_rollout_ref.rollout.temperature), compare another metric "
    "(algorithm.filter_groups.metric), or search longer (algorithm.filter_groups.max_num_gen_batches)"
)


def differs(metric: str) -> HasSignal:
    """Return a check whether a metric differs within a group: the score, or one that the reward function returned.

    The score is that of the reward function, without penalties for length: a group that is wrong throughout has no
    signal, however long its responses are. `seq_final_reward` includes them. A group with a single scored sample has
    no signal.
    """

    def value(sample: SampleHandle) -> float:
        if metric == "seq_final_reward":
            return sample.score
        if metric not in sample.metrics:
            if metric in _SCORE_NAMES:
                return _raw_score(sample)
            raise ConfigError(
                [
                    f"algorithm.filter_groups.metric={metric}: the reward of a response to prompt {sample.group} has "
                    f"no such number; choose one of {', '.join(['score', *sorted(sample.metrics)])}, or return it from "
                    "the reward function in a dict"
                ]
            )
        return sample.metrics[metric]

    def has_signal(samples: list[SampleHandle]) -> bool:
        return len({value(sample) for sample in samples}) > 1

    return has_signal


@dataclass(frozen=True, slots=True)
class _Group:
    samples: list[SampleHandle]
    has_signal: bool = True
    dropped: bool = False  # the prompt is too long


class EpisodeBuffer:
    """Starts the episodes of prompts in the order of the stream, and returns finished groups in the same order.

    Invariant: with the weights of version v in the engines, at most `batch * (v + 1 + max_staleness)` groups have
    started (counted from the first version of the run), so no sample is trained more than `max_staleness` versions
    after the weights that generated it. With 0 the loop is synchronous; with 1 generation runs one step ahead. Only the
    controller calls `advance` and `take`.

    Dynamic sampling: with `has_signal`, a group without signal does not count in that invariant, so the next prompt of
    the stream starts at once. A take goes through the groups in the order of the stream until it has enough with
    signal, but through no more than `max_batches` times as many as requested (0: no bound; `warn` reports a long
    search). So its result depends on the order of the stream and on which groups have signal, never on which finished
    first. No group starts that the takes allowed to use it cannot reach: at version v, none that is
    `batch * (max_batches + max_staleness)` or more after the first group of v's take. So without run-ahead no group is
    left over; with it, the next take uses what is left over, which is still fresh enough.

    A dropped prompt (`run_group` returned None: it is too long, which streamed data shows only when it is read) counts
    nowhere, as if the stream did not contain it.
    """

    def __init__(
        self,
        run_group: RunGroup,
        stream: PromptStream,
        batch: int,
        *,
        max_staleness: int = 0,
        has_signal: HasSignal | None = None,
        max_batches: int = 0,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        if stream.is_adaptive and has_signal is not None and max_staleness > 0:
            raise ConfigError(
                [
                    "data.sampler: with algorithm.filter_groups.enable=true and trainer.max_staleness above 0, which "
                    "prompts follow which scores would depend on timing; set trainer.max_staleness=0"
                ]
            )
        self._run_group, self._stream, self.batch, self._max_staleness = run_group, stream, batch, max_staleness
        self._has_signal, self._max_batches, self._warn = has_signal, max_batches, warn
        self._groups: deque[asyncio.Task[_Group]] = deque()
        self._first: int | None = None  # the first version of the run
        self._version = 0
        self._started = 0  # groups, without those that have no signal
        self._reach = 0  # groups may start before this position of the stream
        self._dropped = 0  # prompts, among the groups that no take has seen yet
        self._has_dropped = False
        self._distrusted: dict[asyncio.Task[_Group], frozenset[int]] = {}  # engines, by group
        self._left_out = 0  # samples of them, in the current take
        self._metrics: dict[str, float] = {}
        self.warnings: list[str] = []  # of the last take

    def advance(self, version: int) -> None:
        """Start the groups that are allowed now that the engines hold `version`."""
        self._first = version if self._first is None else self._first
        self._version = version
        ahead = self.batch * (self._max_batches + self._max_staleness)
        self._reach = self.position + ahead + self._dropped if self._max_batches else sys.maxsize
        self._start_allowed()

    async def take(self, count: int) -> list[SampleHandle]:
        """Return the samples of the `count` oldest groups when all are finished. Raises if an episode fails.

        With dynamic sampling: of the `count` oldest with signal; of fewer, with a warning, if the bound is reached.
        """
        if count > len(self._groups):
            raise RuntimeError(f"take({count}) would wait forever: only {len(self._groups)} groups may run")
        bound, patience = self._max_batches * count or sys.maxsize, LONG_SEARCH * count
        seen: list[_Group] = []  # all, in the order of the stream
        kept: list[_Group] = []
        uniform: list[_Group] = []  # without signal
        dropped: list[_Group] = []
        while (missing := min(count - len(kept), bound - len(kept) - len(uniform))) > 0:
            groups = await self._oldest(missing)
            seen += groups
            for group in groups:
                (dropped if group.dropped else kept if group.has_signal else uniform).append(group)
            if len(dropped) > MAX_DROPPED * count:
                others = len(kept) + len(uniform)
                raise DataError(
                    f"{len(dropped):,} of the last {len(dropped) + others:,} prompts are longer than "
                    "data.max_prompt_length and were dropped; increase it, or fix data.train_files"
                )
            if patience <= len(kept) + len(uniform) < bound and len(kept) < count:
                patience *= 2
                self._warn(f"{self._describe_search(count, kept, uniform)}. The search continues. {_FIX}")
        # Not when a group finishes: an adaptive sampler sees the same scores in the same order after a resume.
        self._stream.record([_raw_score(sample) for sample in group.samples] for group in seen)
        self._started += count - len(kept)  # a smaller batch counts as a whole one
        samples = [sample for group in kept for sample in group.samples]
        if self._left_out and not samples:
            raise ProcessLostError("all samples of this step are of rollout engines that were not verified")
        self._report(count, kept, uniform)
        self._report_dropped(len(dropped), len(kept) + len(uniform))
        if not samples:
            raise RewardError(
                f"none of the responses to {len(kept)} prompts could be scored: there is nothing to train on. Fix the "
                "reward function (reward.max_failure_rate allows this many failures)"
            )
        oldest = min(sample.version for sample in samples)
        if self._version - oldest > self._max_staleness:
            raise WeightSyncError(
                f"a response of version {oldest} of the weights would be trained at version {self._version}, but "
                f"trainer.max_staleness={self._max_staleness}"
            )
        return samples

    def distrust(self, engines: Iterable[int]) -> None:
        """Leave out what these engines generated for groups that have started and were not taken yet."""
        for group in self._groups:
            self._distrusted[group] = self._distrusted.get(group, frozenset()).union(engines)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of dynamic sampling and of dropped prompts in the last take; empty without both."""
        return self._metrics

    def state(self) -> dict[str, Any]:
        """Return the position in the data for a checkpoint. Groups that no take has seen run again."""
        return self._stream.state() | {"position": self.position}

    async def close(self) -> None:
        """Cancel what still runs."""
        for group in self._groups:
            group.cancel()
        await asyncio.gather(*self._groups, return_exceptions=True)
        self._groups.clear()

    @property
    def position(self) -> int:
        """The first position that no take has seen."""
        return self._stream.position - len(self._groups)

    def _start_allowed(self) -> None:
        assert self._first is not None, "advance comes first"
        allowed = self.batch * (self._version - self._first + 1 + self._max_staleness)
        while self._started < allowed and self._stream.position < self._reach:
            self._groups.append(asyncio.ensure_future(self._generate(*next(self._stream))))
            self._started += 1

    async def _generate(self, position: int, row: int) -> _Group:
        samples = await self._run_group(position, row)
        if samples is None:
            self._dropped += 1
            self._started -= 1
            self._reach += 1
            self._start_allowed()
            return _Group([], dropped=True)
        if self._has_signal is None or self._has_signal(samples):
            return _Group(samples)
        self._started -= 1
        self._start_allowed()
        # Release samples that are not trained from the object store now, not at the next take.
        return _Group([replace(sample, ref=None) for sample in samples], has_signal=False)

    async def _oldest(self, count: int) -> list[_Group]:
        tasks = [self._groups.popleft() for _ in range(count)]
        try:
            groups = [
                self._leave_out(group, self._distrusted.pop(task, None))
                for task, group in zip(tasks, await asyncio.gather(*tasks), strict=True)
            ]
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        self._dropped -= sum(group.dropped for group in groups)
        return groups

    def _leave_out(self, group: _Group, engines: frozenset[int] | None) -> _Group:
        kept = [sample for sample in group.samples if not engines or not engines & sample.engines]
        self._left_out += len(group.samples) - len(kept)
        return replace(group, samples=kept)

    def _report(self, count: int, kept: Sequence[_Group], uniform: Sequence[_Group]) -> None:
        """Set metrics and warnings of a take; raise if there is nothing to train on."""
        self._metrics, self.warnings = {}, []
        if self._left_out:
            self._metrics["faults/samples_left_out"] = float(self._left_out)
            self.warnings = [f"{self._left_out:,} samples of rollout engines that were not verified are not trained"]
            self._left_out = 0
        if self._has_signal is None:
            return
        generated = len(kept) + len(uniform)
        self._metrics |= {
            "sampling/groups_generated": float(generated),
            "sampling/groups_dropped": float(len(uniform)),
            "sampling/gen_batches": generated / count,
        }
        if not uniform:
            return
        self._metrics["sampling/dropped_score_mean"] = _mean_score(uniform)
        if len(kept) == count:
            return
        search = self._describe_search(count, kept, uniform)
        if not kept:
            last = self.position
            raise RewardError(f"{search}. Their prompts are {last - generated} to {last - 1} of the stream. {_FIX}")
        self.warnings.append(f"{search}. The step trains on the smaller batch. {_FIX}")

    def _describe_search(self, count: int, kept: Sequence[_Group], uniform: Sequence[_Group]) -> str:
        bound = f"at most {self._max_batches} batches are searched" if self._max_batches else "searched without a bound"
        return (
            f"dynamic sampling: {len(kept)} of {len(kept) + len(uniform):,} groups have different scores, "
            f"{count:,} are needed ({bound}); the mean score of the others is {_mean_score(uniform):.3g}"
        )

    def _report_dropped(self, dropped: int, others: int) -> None:
        """Warn at the first dropped prompt; from then on there is a metric."""
        if dropped and not self._has_dropped:
            self._has_dropped = True
            self.warnings.append(
                f"{dropped:,} of {dropped + others:,} prompts are longer than data.max_prompt_length and were dropped "
                "(data.filter_overlong_prompts=True); the next prompts replace them. From now on data/left_out counts "
                "them for each step"
            )
        if self._has_dropped:
            self._metrics["data/left_out"] = float(dropped)


def _raw_score(sample: SampleHandle) -> float:
    """Return the score of the reward function, without penalties for length."""
    return sample.metrics.get("raw_score", sample.score)


def _mean_score(groups: Sequence[_Group]) -> float:
    scores = [sample.score for group in groups for sample in group.samples]
    return sum(scores) / max(len(scores), 1)
