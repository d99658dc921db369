"""Passes of an engine over a batch in micro-batches, and the metrics of several updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages import AdvantageInputs
from verl.algorithms.objective import ModelOutput, make_loss_inputs
from verl.algorithms.prepass import Prepass, token_noise
from verl.algorithms.settings import LossOptions
from verl.data.flat_batch import FlatBatch
from verl.data.plan import MicroBatches
from verl.training.engine import ReferenceEngine


def compute_logprobs(engine: ReferenceEngine[ModelOutput], batch: FlatBatch, cuts: MicroBatches) -> Tensor:
    """Compute the log-probs [T] of a batch, one micro-batch after another."""
    return restore_order(batch, cuts, [output.logprobs for output in engine.forward(batch.split(cuts))])


def restore_order(batch: FlatBatch, cuts: MicroBatches, parts: Sequence[Tensor]) -> Tensor:
    """Return per-token values or rows of micro-batches in the order of the batch's tokens [T]."""
    indices = batch.with_(tokens=torch.arange(batch.num_tokens)).select([*chain.from_iterable(cuts)]).tokens
    like = parts[0] if parts else torch.empty(0, dtype=torch.float32)  # a thread's export changes the default dtype
    values = like.new_zeros(batch.num_tokens, *like.shape[1:])
    values[indices] = torch.cat([values[:0], *parts])
    return values


def run_prepass(
    prepasses: Iterable[Prepass],
    engine: ReferenceEngine[ModelOutput] | None,
    batch: FlatBatch,
    inputs: AdvantageInputs,
    parts: MicroBatches,
    options: LossOptions | None = None,
) -> tuple[list[FlatBatch], dict[str, float]]:
    """Return the micro-batches of a mini-batch with the fields that prepasses set, and their metrics.

    They see the current log-probs: those of the engine; without one, the old log-probs are still current.
    """
    indices = torch.tensor([*chain.from_iterable(parts)], dtype=torch.int64)
    batch = batch.select(indices)
    cuts = np.split(np.arange(len(indices)), np.cumsum([*map(len, parts)]))[:-1]
    logprobs = batch.old_logprobs
    if engine is not None:
        logprobs = torch.cat([output.logprobs for output in engine.forward(batch.split(cuts))])
    assert logprobs is not None
    metrics: dict[str, float] = {}
    for prepass in prepasses:
        samples = inputs.select(indices, batch.mask, batch.offsets, batch.shares)
        assert samples.episodes is not None
        noise = token_noise(samples.groups[batch.segment_ids], samples.episodes[batch.segment_ids], batch.positions)
        result = prepass(make_loss_inputs(logprobs, batch), samples, noise, options or LossOptions())
        batch, metrics = batch.with_(**result.fields), metrics | result.metrics
    return batch.split(cuts), metrics


def average_steps(steps: Sequence[dict[str, float]], role: str) -> dict[str, float]:
    """Return the means over the optimizer steps of a model, its last learning rate, and the sum of skipped steps."""
    metrics = {name: float(np.mean([step[name] for step in steps if name in step])) for name in steps[0]}
    metrics[f"{role}/skipped_steps"] = sum(step[f"{role}/skipped_steps"] for step in steps)
    metrics[f"{role}/lr"] = steps[-1][f"{role}/lr"]
    return metrics
