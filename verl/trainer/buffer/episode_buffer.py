"""The buffer: starts groups of episodes, and hands finished ones to training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from verl.config.schema.algorithm import FilterGroupsConfig
from verl.data.samplers import PromptStream
from verl.errors import WeightSyncError
from verl.trainer.buffer.admission import Admission
from verl.trainer.buffer.groups import Group
from verl.trainer.buffer.report import IdleTimer, Take
from verl.trainer.buffer.selection import Selection
from verl.trainer.buffer.signal import get_raw_score, group_has_signal
from verl.types import SampleHandle

RunGroup = Callable[[int, int], Awaitable[list[SampleHandle] | None]]
"""(position in the stream, row of the data) -> the finished samples of that prompt; None: the prompt is dropped."""


class EpisodeBuffer:
    """Starts the episodes of prompts in the order of the stream, as far as `Admission` allows; `Selection` decides
    which finished groups a step takes. Only the controller calls `advance` and `take`.

    No sample is trained more than `max_staleness` versions after the weights that generated it, and none is dropped
    for its age: a step waits for groups that would become too old. With 0 the loop is synchronous, and a take does not
    depend on which group finished first. With more, generation runs up to `run_ahead` batches ahead of training, and
    long responses go on while shorter ones are trained.

    Dynamic sampling (`signal`): a group without signal is replaced by the next prompt of the stream at once, and a take
    goes on until it has enough groups with signal, or has reached the bound of the filter.

    A prompt is dropped if `run_group` returns None: it is too long, which streamed data shows only when it is read.

    Attributes:
        metrics: The metrics of the last take; empty if no sample was discarded, rejected or dropped.
        warnings: The warnings of the last take.
        record: What the last take has used, for `trained.jsonl`.
        idle: Measures the time in which no group runs, from the last `advance` on.
    """

    def __init__(
        self,
        run_group: RunGroup,
        stream: PromptStream,
        batch: int,
        *,
        max_staleness: int = 0,
        run_ahead: float | None = None,
        signal: FilterGroupsConfig | None = None,
        steps: int | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Start nothing yet.

        Args:
            run_group: Runs the episodes of a prompt.
            stream: The prompts.
            batch: The number of groups that a step takes.
            max_staleness: The versions that a sample may lag behind.
            run_ahead: The batches that generation may be ahead of training, at most `max_staleness`; None: as many.
            signal: The filter of dynamic sampling.
            steps: The steps until the end of the run, after which no group is needed; None: unknown.
            warn: Shows a warning while a take lasts.
        """
        assert max_staleness == 0 or not stream.is_adaptive, "which prompts follow which scores depends on time"
        run_ahead = max_staleness if run_ahead is None else run_ahead
        assert run_ahead <= max_staleness, "groups could not be trained in time"
        self._run_group, self._stream, self.batch, self._max_staleness = run_group, stream, batch, max_staleness
        self._signal, self._warn = signal, warn
        max_batches = 0 if signal is None else signal.max_num_gen_batches
        self._admission = Admission(batch, run_ahead=run_ahead, max_batches=max_batches, steps=steps)
        self._selection = Selection(batch, max_staleness)
        self._groups: dict[int, Group] = {}  # by position: started and not taken
        self._unusable: list[Group] = []  # those of them that will not be trained
        self._dropped = 0  # the number of dropped prompts among the unusable groups
        self._changed = asyncio.Event()  # a group has finished or failed
        self._error: BaseException | None = None  # the first group that failed raised it
        self._version = 0
        self._has_dropped = False
        self.metrics: dict[str, float] = {}
        self.warnings: list[str] = []
        self.record: dict[str, Any] = {}
        self.idle = IdleTimer()

    def advance(self, version: int) -> None:
        """Start the groups that are allowed now that the engines have `version`."""
        self._version = version
        self.idle.read()
        self._admission.advance(version)
        self._start_allowed()

    async def take(self, count: int) -> list[SampleHandle]:
        """Return the samples of `count` groups when they are finished. Raises if an episode fails.

        With dynamic sampling: `count` groups with signal; fewer, with a warning, if the bound is reached.
        """
        if count > len(self._groups):
            raise RuntimeError(f"take({count}) would wait forever: only {len(self._groups)} groups may run")
        take = Take(count, self._signal, self._warn)
        while not self._fill(take):
            self._changed.clear()
            await self._changed.wait()
        # Not when a group finishes: an adaptive sampler sees the same scores in the same order after a resume.
        self._stream.record([get_raw_score(sample) for sample in group.episodes] for group in take.seen)
        self._admission.record_started(count - len(take.trained))  # a smaller batch counts as a whole one
        self._start_allowed()
        take.finish(self.position, has_dropped=self._has_dropped)
        self._has_dropped |= take.dropped > 0
        self.metrics, self.warnings = take.metrics, take.warnings
        self.record = {
            "version": self._version,
            "max_staleness": self._max_staleness,
            "position": self.position,
            **take.describe(),
        }
        samples = [sample for group in take.trained for sample in group.samples]
        oldest = min((sample.version for sample in samples if sample.generated), default=self._version)
        if self._version - oldest > self._max_staleness:
            raise WeightSyncError(
                f"a response of version {oldest} of the weights would be trained at version {self._version}, but "
                f"trainer.max_staleness={self._max_staleness}"
            )
        return samples

    def discard_from(self, engines: Iterable[int]) -> None:
        """Discard what these engines generate for groups that have started and were not taken yet."""
        unverified = frozenset(engines)
        for group in self._groups.values() if unverified else ():
            group.unverified |= unverified

    def state(self) -> dict[str, Any]:
        """Return the position in the data for a checkpoint, and which prompts after it are done.

        Groups that no take has seen run again from their prompts.
        """
        progress = self.progress()
        return self._stream.state() | {name: value for name, value in progress.items() if value != []}

    def progress(self) -> dict[str, Any]:
        """Return the first position that is not done, and the later ones that are."""
        done = [each for each in range(self.position, self._stream.position) if each not in self._groups]
        return {"position": self.position, "consumed": done + self._stream.consumed}

    async def close(self) -> None:
        """Cancel the groups that still run."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.task.cancel()
        await asyncio.gather(*(group.task for group in groups.values()), return_exceptions=True)

    @property
    def position(self) -> int:
        """The first position that no take has seen."""
        return next(iter(self._groups), self._stream.position)

    def _start_allowed(self) -> None:
        while self._admission.may_start(len(self._groups) - self._dropped):
            position, row = next(self._stream)
            self._groups[position] = group = Group(position, self._version)
            self._admission.record_started()
            self._selection.record_started(group.version)
            group.task = asyncio.ensure_future(self._run(group, row))

    async def _run(self, group: Group, row: int) -> None:
        self.idle.begin()
        try:
            self._finish(group, await self._run_group(group.position, row))
        except BaseException as error:
            self._error = self._error or error  # the take raises it
            if not isinstance(error, Exception):
                raise
        finally:
            self.idle.end()
            self._changed.set()

    def _finish(self, group: Group, samples: list[SampleHandle] | None) -> None:
        """Record the result of a group; start another one if this one will not be trained."""
        group.finish(samples, has_signal=self._signal is None or group_has_signal(samples or [], self._signal.metric))
        if group.is_usable:
            self._selection.record_finished(group.version)
            return
        self._unusable.append(group)
        self._dropped += group.is_dropped
        self._admission.record_unusable()
        self._selection.record_unusable(group.version)
        self._start_allowed()

    def _fill(self, take: Take) -> bool:
        """Give a take the groups that it can have now; return whether it is complete. Raises if an episode failed."""
        if self._error is not None:
            for group in self._groups.values():
                group.task.cancel()
            raise self._error
        finished = self._selection.finished
        unusable, self._unusable = self._unusable, []
        take.add_unusable(unusable, finished)
        count = min(take.count, finished) if take.has_reached_bound(finished) else take.count
        if not self._selection.can_take(count, self._version):
            return False
        take.train(self._selection.take((group for group in self._groups.values() if group.is_usable), count))
        for group in take.seen:
            del self._groups[group.position]
        self._dropped -= take.dropped
        return True
