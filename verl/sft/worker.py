"""The train workers of supervised fine-tuning: one process per rank, each with its shard of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.sft.examples import RankBatch
from verl.tracking.metrics import resident_gib
from verl.workers.rank_speed import compare_replies
from verl.workers.train_base import BaseTrainWorker, RankGroup, explain_out_of_memory
from verl.workers.train_settings import RankSettings


class SFTWorker(BaseTrainWorker):
    """The actor of one rank."""

    @explain_out_of_memory
    def start(self, address: tuple[str, int], settings: RankSettings) -> list[str]:
        """Join the other ranks and load the model; return notes for the user.

        New weights are the same on all ranks; later random draws differ.
        """
        import torch

        from verl.sft.model import SFTModel
        from verl.training.registry import build_engine

        self.join(address, settings)
        torch.manual_seed(settings.seed)
        engine = build_engine(settings.actor)
        self._model = self._trained = SFTModel(engine)
        torch.manual_seed(settings.seed + 1 + self._rank)
        return list(engine.notes)

    @explain_out_of_memory
    def update(self, rank_batch: RankBatch) -> dict[str, Any]:
        self._divergence = None
        with self._phases.measure("update"):
            metrics = self._model.update(rank_batch) | self.peak_memory()
            metrics |= {"perf/train_worker_rss_gib": resident_gib()} | self.probe_speed()
        return metrics | self.take_phases()

    @explain_out_of_memory
    def loss(self, rank_batch: RankBatch) -> tuple[float, float]:
        return self._model.loss(rank_batch)


class SFTWorkerGroup(RankGroup):
    """The client of all ranks of a model."""

    worker = SFTWorker

    async def update(self, rank_batches: Sequence[RankBatch]) -> dict[str, float]:
        """Do one optimizer step on the batch that is split over the ranks."""
        replies = await self.call("update", per_rank=self.layout.spread(rank_batches), timeout=self._timeouts.train)
        self._collect_phases(replies)
        return replies[0] | compare_replies(replies)

    async def loss(self, rank_batches: Sequence[RankBatch]) -> tuple[float, float]:
        """Return the sum of the losses of all trained tokens, and their count, without training."""
        return (await self.call("loss", per_rank=self.layout.spread(rank_batches), timeout=self._timeouts.train))[0]
