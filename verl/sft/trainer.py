"""The loop of supervised training. One step is `SFTTrainer.step`; `fitting` decides when to validate, save and stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from verl.sft.batches import RankBatch
from verl.sft.data import SFTDataLoader, ValidationLoader
from verl.tracking.console import Console
from verl.tracking.metrics import Metrics, resident_gib, timer
from verl.tracking.sinks import Sink
from verl.trainer.checkpointing import Checkpointer
from verl.trainer.restarts import RestartTracker
from verl.trainer.train_loop import LoopSchedule, TrainLoop

__all__ = ["SFTTrainer", "TrainedModel"]


class TrainedModel(Protocol):
    """The trained model over all ranks, as the loop needs it."""

    async def update(self, rank_batches: Sequence[RankBatch]) -> dict[str, float]: ...
    async def loss(self, rank_batches: Sequence[RankBatch]) -> tuple[float, float]: ...


class SFTTrainer(TrainLoop):
    """Consumes batches of examples, produces versions of the weights."""

    def __init__(
        self,
        loader: SFTDataLoader,
        model: TrainedModel,
        validation: ValidationLoader | None,
        checkpointer: Checkpointer,
        schedule: LoopSchedule,
        tracker: Sink,
        console: Console,
        restarts: RestartTracker,
        version: int = 0,
    ) -> None:
        super().__init__(checkpointer, schedule, tracker, console, restarts, version)
        self.loader, self.model, self.validation = loader, model, validation

    async def step(self, version: int) -> Metrics:
        """One optimiser step: a batch of examples in, weights of `version + 1` out."""
        times = Metrics()
        with timer(times, "step"):
            with timer(times, "data"):
                batch = await self.loader.take(version)  # read, tokenised and cut while the former step trained
            with timer(times, "update"):
                update = await self.model.update(batch.rank_batches)
        whole = {
            "data/position": self.loader.position(version + 1),
            "perf/throughput": batch.metrics["plan/tokens"] / times["timing_s/step"],
            "perf/controller_rss_gib": resident_gib(),
        }
        return Metrics.merge(batch.metrics, update, times, whole)

    async def report(self, metrics: Metrics) -> None:
        await super().report(metrics)
        if metrics.get("train/skipped_steps"):
            norm = metrics["train/grad_norm"]
            why = "no token of it is trained" if norm == 0 else f"the gradient's norm is {norm}"
            self.console.advice(f"step {self.version} moved no weights: {why}")

    async def validate(self) -> None:
        if self.validation is None:
            return
        times, total, tokens = Metrics(), 0.0, 0.0
        with timer(times, "validation"):
            async for rank_batches in self.validation.batches():
                part, count = await self.model.loss(rank_batches)
                total, tokens = total + part, tokens + count
        self.tracker.log({"val/loss": total / max(tokens, 1.0), **times}, self.version)

    def state(self) -> dict[str, Any]:
        return {"data": self.loader.state(self.version)}
