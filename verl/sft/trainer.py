"""Supervised fine-tuning: batches, loaded one step ahead, the step, and validation. `verl.trainer.train_loop` decides
when each is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from verl.data.micro_batches import MicroBatchLimit
from verl.data.samplers import Sampler
from verl.diagnosis.diagnosis import Diagnosis
from verl.diagnosis.rule import Advice
from verl.sft.data import ExampleDataset
from verl.sft.examples import Example, RankBatch
from verl.sft.worker import SFTWorkerGroup
from verl.tracking.buffered_sink import BufferedSink
from verl.tracking.metrics import Metrics, resident_gib, timer
from verl.tracking.phases import PHASES, PhaseTimes
from verl.trainer.train_loop import Validation


def split_batch(examples: Sequence[Example], ranks: int, limit: MicroBatchLimit) -> list[RankBatch]:
    """Split a batch over ranks, balanced by tokens, into equally many micro-batches on each (some may be empty)."""
    lengths = [len(example.tokens) for example in examples]
    by_rank = limit.balance(lengths, ranks)
    micro_batches = limit.split([[lengths[k] for k in indices] for indices in by_rank])
    return [
        [[examples[indices[k]] for k in part] for part in parts]
        for indices, parts in zip(by_rank, micro_batches, strict=True)
    ]


StepBatch = tuple[list[RankBatch], dict[str, float]]
"""The batches of all ranks, and their metrics."""


class SFTDataLoader:
    """Loads the batch of each step, a function of the step alone; the next one is prepared during training."""

    def __init__(
        self,
        dataset: ExampleDataset,
        order: Sampler,
        batch: int,
        split: Callable[[Sequence[Example]], list[RankBatch]],
        *,
        start: int = 0,
        version: int = 0,
    ) -> None:
        self._dataset, self._order, self.batch, self._split = dataset, order, batch, split
        self._start, self._version = start, version
        self._ahead: tuple[int, asyncio.Task[StepBatch]] | None = None

    def position(self, version: int) -> int:
        """Return the position in the order at which the step after `version` begins."""
        return self._start + (version - self._version) * self.batch

    def state(self, version: int) -> dict[str, Any]:
        """Return the position after `version` and the identity of the order, for a checkpoint."""
        return {"position": self.position(version), **self._order.identity()}

    async def take(self, version: int) -> StepBatch:
        """Return the batch of the step after `version` and start to prepare the next one."""
        ready = self._begin(version) if self._ahead is None or self._ahead[0] != version else self._ahead[1]
        batch = await ready
        self._ahead = version + 1, self._begin(version + 1)
        return batch

    def load(self, dataset: ExampleDataset, rows: Iterable[int]) -> list[RankBatch]:
        """Return the examples of these rows, split over the ranks."""
        return self._split([dataset[row] for row in rows])

    def close(self) -> None:
        """Cancel the preparation of the next batch."""
        if self._ahead is not None:
            self._ahead[1].cancel()

    def _begin(self, version: int) -> asyncio.Task[StepBatch]:
        return asyncio.create_task(asyncio.to_thread(self._make, version))

    def _make(self, version: int) -> StepBatch:
        first = self.position(version)
        rows = [self._order.row(position) for position in range(first, first + self.batch)]
        rank_batches = self.load(self._dataset, rows)
        examples = [list(chain.from_iterable(micro_batches)) for micro_batches in rank_batches]
        tokens = [sum(len(example.tokens) for example in of_rank) for of_rank in examples]
        metrics = {
            "plan/samples": len(rows),
            "plan/tokens": sum(tokens),
            "plan/trained_tokens": sum(int(example.mask.sum()) for example in chain.from_iterable(examples)),
            "plan/imbalance": max(tokens) * len(tokens) / max(sum(tokens), 1),
            "plan/micro_batches": len(rank_batches[0]),
        }
        return rank_batches, {name: float(value) for name, value in metrics.items()}


class SFTTrainer:
    """The task of an SFT run. Consumes batches of examples, produces versions of the weights."""

    def __init__(
        self,
        loader: SFTDataLoader,
        model: SFTWorkerGroup,
        validation: ExampleDataset | None = None,
        phases: BufferedSink | None = None,
    ) -> None:
        """`phases` records when each phase of a step began and ended."""
        self.loader, self.model, self.validation = loader, model, validation
        self._phases, self._times = phases, PhaseTimes()
        self._diagnosis = Diagnosis()

    async def begin(self, version: int) -> None:
        """Nothing to prepare."""

    async def step(self, version: int) -> Metrics:
        """One optimizer step: a batch of examples in, weights of `version + 1` out."""
        times = Metrics()
        with timer(times, "step"):
            with timer(times, "data"), self._times.measure("data"):
                # The loader has read, tokenized and split these examples during the previous step.
                rank_batches, metrics = await self.loader.take(version)
            with timer(times, "update"), self._times.measure("update"):
                update = await self.model.update(rank_batches)
        rows = self._times.take()
        if self._phases is not None:
            self._phases.log({PHASES: [*rows, *self.model.take_phases()]}, version + 1)
        whole = {
            "data/position": self.loader.position(version + 1),
            "perf/throughput": metrics["plan/tokens"] / times["timing_s/step"],
            "perf/controller_rss_gib": resident_gib(),
        }
        return Metrics.merge(metrics, update, times, whole)

    async def diagnose(self, metrics: Metrics, version: int) -> list[Advice]:
        return self._diagnosis.advise(metrics, version)

    async def validate(self, version: int) -> Validation | None:
        if self.validation is None:
            return None
        times, loss, tokens = Metrics(), 0.0, 0.0
        with timer(times, "validation"):
            for first in range(0, len(self.validation), self.loader.batch):
                rows = range(first, min(first + self.loader.batch, len(self.validation)))
                rank_batches = await asyncio.to_thread(self.loader.load, self.validation, rows)
                batch_loss, batch_tokens = await self.model.loss(rank_batches)
                loss, tokens = loss + batch_loss, tokens + batch_tokens
        return Validation({"val/loss": loss / max(tokens, 1.0), **times}, [])

    async def prepare_save(self, version: int) -> None:
        """Nothing shares the devices."""

    def state(self, version: int) -> dict[str, Any]:
        return {"data": self.loader.state(version)}

    def has_weights(self, version: int) -> bool:
        return False  # a step is little more than its update
