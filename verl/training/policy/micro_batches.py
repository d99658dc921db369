"""Forward passes over a batch in micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.algorithms.objective import ModelOutput
from verl.data.flat_batch import FlatBatch
from verl.data.plan import RaggedIndices
from verl.training.engine import TrainEngine


def batch_logprobs(engine: TrainEngine[ModelOutput], batch: FlatBatch, cuts: RaggedIndices) -> Tensor:
    """Compute the log-probs [T] of a batch, one micro-batch after another."""
    return restore_order(batch, cuts, [output.logprobs for output in engine.forward(batch.split(cuts))])


def restore_order(batch: FlatBatch, cuts: RaggedIndices, parts: Sequence[Tensor]) -> Tensor:
    """Return per-token values of micro-batches in the order of the batch's tokens [T]."""
    indices = batch.with_(tokens=torch.arange(batch.num_tokens)).select(cuts.indices).tokens
    values = torch.zeros(batch.num_tokens, dtype=torch.float32)  # an export in a thread changes torch's default dtype
    values[indices] = torch.cat([values[:0], *parts])
    return values
