"""The base model of an adapter as the reference of the adapted policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from verl.algorithms.objective import ModelOutput
from verl.data.flat_batch import FlatBatch
from verl.training.fsdp import FsdpEngine
from verl.training.logprobs import LastLayer
from verl.training.lora import disable_adapter


class BaseModelReference:
    """An engine with its adapter disabled: no second copy of the weights, and never updated."""

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine
        self.rank, self.world_size = engine.rank, engine.world_size

    def forward(
        self, micro_batches: Sequence[FlatBatch], *, temperature: float | None = None, reference: Any = None
    ) -> list[ModelOutput]:
        with disable_adapter(self._engine.model):
            return self._engine.forward(micro_batches, temperature=temperature, reference=reference)

    def last_layer(self, batch: FlatBatch) -> LastLayer:
        """Return the last layer without the adapter; safe in the middle of an update of the adapted model."""
        training = self._engine.model.training
        with disable_adapter(self._engine.model):
            layer = self._engine.last_layer(batch)
        self._engine.model.train(training)
        return layer

    def reshard(self) -> None:
        self._engine.reshard()

    def gather(self, rows: Tensor) -> Tensor:
        return self._engine.gather(rows)

    def load_state(self, state: dict[str, Any]) -> None:
        """Do nothing: its weights are those of the model's path."""
