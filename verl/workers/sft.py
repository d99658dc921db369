"""The workers of supervised training: one process per rank, each with its shard of the model."""

from __future__ import annotations

from collections.abc import Sequence

from verl.data.sft_batches import Share
from verl.tracking.metrics import resident_gib
from verl.workers.base import BaseTrainWorker, RankGroup, RankSettings

__all__ = ["SftGroup", "SftWorker"]


class SftWorker(BaseTrainWorker):
    """The actor of one rank of a model that is trained on examples."""

    def start(self, address: tuple[str, int], settings: RankSettings) -> list[str]:
        """Join the other ranks and load the model. New weights are the same everywhere, later draws differ by rank.

        Returns what the user should know of it.
        """
        import torch

        from verl.training.fsdp import FsdpEngine
        from verl.training.supervised import Supervised

        self.join(address, settings)
        torch.manual_seed(settings.seed)
        engine = FsdpEngine(settings.actor)
        self._model = self._trained = Supervised(engine)
        torch.manual_seed(settings.seed + 1 + self._rank)
        return engine.notes

    def update(self, share: Share) -> dict[str, float]:
        return self._model.update(share) | {"perf/train_worker_rss_gib": resident_gib()}

    def loss(self, share: Share) -> tuple[float, float]:
        return self._model.loss(share)


class SftGroup(RankGroup):
    """All ranks as the trainer sees them: one model."""

    worker = SftWorker

    async def update(self, shares: Sequence[Share]) -> dict[str, float]:
        """One optimiser step on the batch that the shares of all ranks are together."""
        return (await self._call("update", per_rank=shares, deadline=self._deadlines.train))[0]

    async def loss(self, shares: Sequence[Share]) -> tuple[float, float]:
        """The sum of the losses of all trained tokens, and how many these are; nothing is learned."""
        return (await self._call("loss", per_rank=shares, deadline=self._deadlines.train))[0]
