"""Supervised fine-tuning: the step and validation. `verl.trainer.train_loop` decides when each is due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from verl.sft.batches import RankBatch
from verl.sft.data import SFTDataLoader, ValidationLoader
from verl.tracking.metrics import Metrics, resident_gib, timer
from verl.trainer.train_loop import Validation


class TrainedModel(Protocol):
    """The trained model over all ranks."""

    async def update(self, rank_batches: Sequence[RankBatch]) -> dict[str, float]: ...
    async def loss(self, rank_batches: Sequence[RankBatch]) -> tuple[float, float]: ...


class SFTTrainer:
    """The task of an SFT run. Consumes batches of examples, produces versions of the weights."""

    def __init__(self, loader: SFTDataLoader, model: TrainedModel, validation: ValidationLoader | None = None) -> None:
        self.loader, self.model, self.validation = loader, model, validation

    async def begin(self, version: int) -> None:
        """Nothing to prepare."""

    async def step(self, version: int) -> Metrics:
        """One optimizer step: a batch of examples in, weights of `version + 1` out."""
        times = Metrics()
        with timer(times, "step"):
            with timer(times, "data"):
                batch = await self.loader.take(version)  # read, tokenized and split during the previous step
            with timer(times, "update"):
                update = await self.model.update(batch.rank_batches)
        whole = {
            "data/position": self.loader.position(version + 1),
            "perf/throughput": batch.metrics["plan/tokens"] / times["timing_s/step"],
            "perf/controller_rss_gib": resident_gib(),
        }
        return Metrics.merge(batch.metrics, update, times, whole)

    async def diagnose(self, metrics: Metrics, version: int) -> list[str]:
        if not metrics.get("train/skipped_steps"):
            return []
        norm = metrics["train/grad_norm"]
        why = "no token of it is trained" if norm == 0 else f"the gradient norm is {norm}"
        return [f"step {version} did not change the weights: {why}"]

    async def validate(self, version: int) -> Validation | None:
        if self.validation is None:
            return None
        times, loss, tokens = Metrics(), 0.0, 0.0
        with timer(times, "validation"):
            async for rank_batches in self.validation.batches():
                batch_loss, batch_tokens = await self.model.loss(rank_batches)
                loss, tokens = loss + batch_loss, tokens + batch_tokens
        return Validation({"val/loss": loss / max(tokens, 1.0), **times}, [])

    def state(self, version: int) -> dict[str, Any]:
        return {"data": self.loader.state(version)}
