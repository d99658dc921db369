"""The buffer: starts groups of episodes, and hands finished ones to training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from verl.config.schema.algorithm import FilterGroupsConfig
from verl.data.samplers import PromptStream
from verl.errors import ConfigError, WeightSyncError
from verl.trainer.buffer.admission import Admission
from verl.trainer.buffer.groups import Group
from verl.trainer.buffer.report import Take
from verl.trainer.buffer.selection import InOrder, Selection
from verl.trainer.buffer.signal import get_raw_score, group_has_signal
from verl.types import SampleHandle

RunGroup = Callable[[int, int], Awaitable[list[SampleHandle] | None]]
"""(position in the stream, row of the data) -> the finished samples of that prompt; None: the prompt is dropped."""


class EpisodeBuffer:
    """Starts the episodes of prompts in the order of the stream, as far as `Admission` allows; a `Selection` decides
    which finished groups a step takes. Only the controller calls `advance` and `take`.

    No sample is trained more than `max_staleness` versions after the weights that generated it. With 0 the loop is
    synchronous; with 1 generation runs one step ahead.

    Dynamic sampling (`signal`): a group without signal is replaced by the next prompt of the stream at once, and a take
    goes on until it has enough groups with signal, or has reached the bound of the filter. The result depends on the
    order of the stream and on which groups have signal, never on which finished first. Without run-ahead no group is
    left over; with it, the next take uses what is left over, which is still fresh enough.

    A prompt is dropped if `run_group` returns None: it is too long, which streamed data shows only when it is read.

    Attributes:
        metrics: The metrics of the last take; empty if no sample was discarded, rejected or dropped.
        warnings: The warnings of the last take.
    """

    def __init__(
        self,
        run_group: RunGroup,
        stream: PromptStream,
        batch: int,
        *,
        max_staleness: int = 0,
        signal: FilterGroupsConfig | None = None,
        selection: Selection | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        if stream.is_adaptive and signal is not None and max_staleness > 0:
            raise ConfigError(
                [
                    "data.sampler: with algorithm.filter_groups.enable=true and trainer.max_staleness above 0, which "
                    "prompts follow which scores would depend on timing; set trainer.max_staleness=0"
                ]
            )
        self._run_group, self._stream, self.batch, self._max_staleness = run_group, stream, batch, max_staleness
        self._signal, self._selection, self._warn = signal, selection or InOrder(), warn
        max_batches = 0 if signal is None else signal.max_num_gen_batches
        self._admission = Admission(batch, run_ahead=max_staleness, max_batches=max_batches)
        self._groups: dict[int, Group] = {}  # by position: started and not taken
        self._version = 0
        self._has_dropped = False
        self.metrics: dict[str, float] = {}
        self.warnings: list[str] = []

    def advance(self, version: int) -> None:
        """Start the groups that are allowed now that the engines have `version`."""
        self._version = version
        dropped = sum(group.is_dropped for group in self._groups.values())
        self._admission.advance(version, self.position, dropped)
        self._start_allowed()

    async def take(self, count: int) -> list[SampleHandle]:
        """Return the samples of `count` groups when they are finished. Raises if an episode fails.

        With dynamic sampling: `count` groups with signal; fewer, with a warning, if the bound is reached.
        """
        if count > len(self._groups):
            raise RuntimeError(f"take({count}) would wait forever: only {len(self._groups)} groups may run")
        take = Take(count, self._signal, self._warn)
        while (missing := take.missing) > 0:
            take.add(await self._select(missing))
        # Not when a group finishes: an adaptive sampler sees the same scores in the same order after a resume.
        self._stream.record([get_raw_score(sample) for sample in group.episodes] for group in take.selected)
        self._admission.record_started(count - len(take.trained))  # a smaller batch counts as a whole one
        take.finish(self.position, has_dropped=self._has_dropped)
        self._has_dropped |= take.dropped > 0
        self.metrics, self.warnings = take.metrics, take.warnings
        samples = [sample for group in take.trained for sample in group.samples]
        oldest = min(sample.version for sample in samples)
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
        """Return the position in the data for a checkpoint. Groups that no take has seen run again."""
        return self._stream.state() | {"position": self.position}

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
        while self._admission.may_start(self._stream.position):
            position, row = next(self._stream)
            self._groups[position] = group = Group(position, self._version)
            group.task = asyncio.ensure_future(self._run(group, row))
            self._admission.record_started()

    async def _run(self, group: Group, row: int) -> None:
        samples = await self._run_group(group.position, row)
        if samples is None:
            group.is_dropped = True
            self._admission.record_dropped()
        else:
            group.samples = samples
            if self._signal is None or group_has_signal(samples, self._signal.metric):
                return
            group.reject()
            self._admission.record_rejected()
        self._start_allowed()

    async def _select(self, count: int) -> list[Group]:
        try:
            groups = await self._selection.select(self._groups.values(), count, self._version)
        except BaseException:
            for group in self._groups.values():
                group.task.cancel()
            raise
        for group in groups:
            del self._groups[group.position]
        return groups
