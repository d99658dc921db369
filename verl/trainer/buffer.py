"""What feeds the loop: groups of episodes on their way, never more of them than the staleness allows."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.data.stream import PromptStream
from verl.errors import ConfigError, DataError, RewardError, WeightSyncError
from verl.types import SampleHandle

__all__ = ["EpisodeBuffer", "differs"]

RunGroup = Callable[[int, int], Awaitable[list[SampleHandle] | None]]
"""(position in the data stream, row of the data) -> the finished samples of that prompt; None: it is left out."""

HasSignal = Callable[[list[SampleHandle]], bool]
"""The finished samples of one prompt -> whether there is anything to learn from how they differ."""

MOST_LEFT_OUT = 100  # for each prompt of a batch; more are data that do not fit the settings
LONG_SEARCH = 10  # batches without enough groups that have signal, before the first word on it

_SCORE_NAMES = ("score", "seq_reward", "seq_final_reward")
_MEND = (
    "Give prompts that the model solves sometimes (data.train_files), draw more or more varied answers for each "
    "(actor_rollout_ref.rollout.n, actor_rollout_ref.rollout.temperature), compare another number "
    "(algorithm.filter_groups.metric), or search longer (algorithm.filter_groups.max_num_gen_batches)"
)


def differs(metric: str) -> HasSignal:
    """Whether a number differs within a group: the score, or one that the reward function returned beside it.

    An answer that is alone, since the others could not be scored, has nothing to differ from.
    """

    def value(sample: SampleHandle) -> float:
        if metric in _SCORE_NAMES:
            return sample.score
        if metric not in sample.metrics:
            raise ConfigError(
                [
                    f"algorithm.filter_groups.metric={metric}: no such number came with an answer to prompt "
                    f"{sample.group}; choose one of {', '.join(['score', *sorted(sample.metrics)])}, or let the reward "
                    f"function return a dict with {metric!r} in it"
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
    left_out: bool = False


class EpisodeBuffer:
    """Starts the episodes of prompts in the order of the stream, and hands out finished groups in the same order.

    The law: with the weights of version v in the engines, at most `batch * (v + 1 + max_staleness)` groups have started
    (counted from the version that the run began with), so no sample is trained more than `max_staleness` versions after
    the weights that wrote it. With 0 the loop is synchronous; with 1 generation runs one step ahead. The controller
    calls `advance` and `take`; nobody else does.

    Dynamic sampling: with `has_signal`, a group found to be without signal does not count in that law, so the next
    prompt of the stream starts in its place at once. A take looks at groups in the order of the stream until it has
    enough with signal, but at no more than `max_batches` times as many as it was asked for (0: no bound; `warn` reports
    a long search). So what it returns follows from the order of the stream and from which groups have signal, never
    from which finished first.
    Nothing starts that is beyond the reach of the takes that may still use it: at version v, no group that lies
    `batch * (max_batches + max_staleness)` or more after the first that the take of v looks at. Without run-ahead no
    group is therefore left over; with it, what a take did not look at is there for the next one, and is young enough.

    A prompt that is left out (`run_group` gave None: it is too long, and of a streamed data set that is found out when
    it is read) counts nowhere in these laws: it is as if the stream did not have it. It is reported.
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
        self._run_group, self._stream, self.batch, self._max_staleness = run_group, stream, batch, max_staleness
        self._has_signal, self._max_batches, self._warn = has_signal, max_batches, warn
        self._groups: deque[asyncio.Task[_Group]] = deque()
        self._first: int | None = None  # version that the run began with
        self._version = 0
        self._started = 0  # without those that had no signal
        self._reach = 0  # the position in the stream before which groups may start
        self._left_out = 0  # of the groups that no take has looked at yet
        self._ever_left_out = False
        self._metrics: dict[str, float] = {}
        self.warnings: list[str] = []  # what the user should know of the last take, in words

    def advance(self, version: int) -> None:
        """The engines hold `version` now: start what that allows."""
        self._first = version if self._first is None else self._first
        self._version = version
        ahead = self.batch * (self._max_batches + self._max_staleness)
        self._reach = self.position + ahead + self._left_out if self._max_batches else sys.maxsize
        self._start_allowed()

    async def take(self, count: int) -> list[SampleHandle]:
        """The samples of the `count` oldest groups, once they are all finished. A failed episode fails the wait.

        With dynamic sampling: of the `count` oldest that have signal; of fewer, and a warning, if the bound is reached.
        """
        if count > len(self._groups):
            raise RuntimeError(f"waiting for {count} groups while only {len(self._groups)} may run: a wait without end")
        bound, patience = self._max_batches * count or sys.maxsize, LONG_SEARCH * count
        kept: list[_Group] = []
        dropped: list[_Group] = []
        left_out: list[_Group] = []
        while (missing := min(count - len(kept), bound - len(kept) - len(dropped))) > 0:
            for group in await self._oldest(missing):
                (left_out if group.left_out else kept if group.has_signal else dropped).append(group)
            if len(left_out) > MOST_LEFT_OUT * count:
                others = len(kept) + len(dropped)
                raise DataError(
                    f"{len(left_out):,} of the last {len(left_out) + others:,} prompts are longer than "
                    "data.max_prompt_length and were left out; raise it, or mend data.train_files"
                )
            if patience <= len(kept) + len(dropped) < bound and len(kept) < count:
                patience *= 2
                self._warn(f"{self._found(count, kept, dropped)}. The search goes on. {_MEND}")
        self._started += count - len(kept)  # the places of a smaller batch are used up all the same
        self._report(count, kept, dropped)
        self._report_left_out(len(left_out), len(kept) + len(dropped))
        samples = [sample for group in kept for sample in group.samples]
        if not samples:
            raise RewardError(
                f"none of the answers to {len(kept)} prompts could be scored, and there is nothing to train on; mend "
                "the reward (reward.max_failure_rate allows so many failures)"
            )
        oldest = min(sample.version for sample in samples)
        if self._version - oldest > self._max_staleness:
            raise WeightSyncError(
                f"an answer was written by version {oldest} of the weights, and version {self._version} is about to be "
                f"trained on it: at most {self._max_staleness} behind is allowed (trainer.max_staleness)"
            )
        return samples

    def metrics(self) -> dict[str, float]:
        """What dynamic sampling cost in the last take, and how many prompts were left out; empty without both."""
        return self._metrics

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the place in the data, without the groups that no take has looked at: they run again."""
        return self._stream.state() | {"position": self.position}

    async def close(self) -> None:
        """Give up what still runs."""
        for group in self._groups:
            group.cancel()
        await asyncio.gather(*self._groups, return_exceptions=True)
        self._groups.clear()

    @property
    def position(self) -> int:
        """The first position that no take has looked at yet."""
        return self._stream.position - len(self._groups)

    def _start_allowed(self) -> None:
        assert self._first is not None, "nothing runs before the first version"
        places = self.batch * (self._version - self._first + 1 + self._max_staleness)
        while self._started < places and self._stream.position < self._reach:
            self._groups.append(asyncio.ensure_future(self._generate(*next(self._stream))))
            self._started += 1

    async def _generate(self, position: int, row: int) -> _Group:
        samples = await self._run_group(position, row)
        if samples is None:
            self._left_out += 1
            self._started -= 1
            self._reach += 1
            self._start_allowed()
            return _Group([], left_out=True)
        if self._has_signal is None or self._has_signal(samples):
            return _Group(samples)
        self._started -= 1
        self._start_allowed()
        # What is not trained on need not stay in the object store until a take comes by.
        return _Group([replace(sample, ref=None) for sample in samples], has_signal=False)

    async def _oldest(self, count: int) -> list[_Group]:
        tasks = [self._groups.popleft() for _ in range(count)]
        try:
            groups = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        self._left_out -= sum(group.left_out for group in groups)
        return groups

    def _report(self, count: int, kept: Sequence[_Group], dropped: Sequence[_Group]) -> None:
        """Metrics and warnings of a take; an error if it has found nothing to train on."""
        self._metrics, self.warnings = {}, []
        if self._has_signal is None:
            return
        looked_at = len(kept) + len(dropped)
        self._metrics = {
            "sampling/groups_generated": float(looked_at),
            "sampling/groups_dropped": float(len(dropped)),
            "sampling/gen_batches": looked_at / count,
        }
        if not dropped:
            return
        self._metrics["sampling/dropped_score_mean"] = _mean_score(dropped)
        if len(kept) == count:
            return
        found = self._found(count, kept, dropped)
        if not kept:
            last = self.position
            raise RewardError(
                f"{found}. They answer the prompts {last - looked_at} to {last - 1} of the stream. {_MEND}"
            )
        self.warnings = [f"{found}. The step trains on the smaller batch. {_MEND}"]

    def _found(self, count: int, kept: Sequence[_Group], dropped: Sequence[_Group]) -> str:
        """How far a search has come, in words."""
        bound = f"at most {self._max_batches} batches are searched" if self._max_batches else "searched without a bound"
        return (
            f"dynamic sampling: {len(kept)} of {len(kept) + len(dropped):,} groups have answers that differ, "
            f"{count:,} were wanted ({bound}); those without scored {_mean_score(dropped):.3g} on average"
        )

    def _report_left_out(self, left_out: int, others: int) -> None:
        """A metric from the first one on, and words for that."""
        if left_out and not self._ever_left_out:
            self._ever_left_out = True
            self.warnings.append(
                f"{left_out:,} of {left_out + others:,} prompts are longer than data.max_prompt_length and were left "
                "out (data.filter_overlong_prompts=True); the next ones of the data took their places. From now on "
                "data/left_out counts them for each step"
            )
        if self._ever_left_out:
            self._metrics["data/left_out"] = float(left_out)


def _mean_score(groups: Sequence[_Group]) -> float:
    scores = [sample.score for group in groups for sample in group.samples]
    return sum(scores) / max(len(scores), 1)
