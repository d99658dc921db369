"""The teacher of a distillation, which may read other prompts than the policy before the same responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from verl.algorithms.objective import ModelOutput
from verl.algorithms.settings import Distillation
from verl.data.flat_batch import FlatBatch
from verl.training.engine import ReferenceEngine
from verl.training.kernels.logprobs import LastLayer


class TeacherEngine:
    """A reference engine that reads `FlatBatch.for_teacher` instead of a batch, if it is set.

    Its results are aligned to the generated tokens of the batch itself: log-probs are at their positions, and the rows
    of the last layer are in their order, with what the settings say about the KL over the vocabulary.
    """

    def __init__(self, engine: ReferenceEngine[ModelOutput], settings: Distillation | None = None) -> None:
        self._engine, self._settings = engine, settings or Distillation()

    def forward(self, micro_batches: Sequence[FlatBatch], **options: Any) -> list[ModelOutput]:
        read = [get_teacher_batch(batch) for batch in micro_batches]
        outputs = self._engine.forward(read, **options)
        moved = []
        for output, source, batch in zip(outputs, read, micro_batches, strict=True):
            columns: list[Any] = [
                None if values is None else _move(values, source.mask, batch.mask) for values in output
            ]
            moved.append(ModelOutput(*columns))
        return moved

    def last_layer(self, batch: FlatBatch) -> LastLayer:
        settings = self._settings
        return self._engine.last_layer(get_teacher_batch(batch))._replace(
            floor=settings.log_prob_min_clamp,
            is_forward=settings.loss_mode != "full",
            topk=settings.topk if settings.loss_mode == "forward_kl_topk" else None,
        )

    def release(self) -> None:
        self._engine.release()


def get_teacher_batch(batch: FlatBatch) -> FlatBatch:
    """Return the batch that the teacher reads, with the mask of `batch`: tokens dropped there are dropped here."""
    view = batch.for_teacher
    if view is None:
        return batch
    generated = view.mask.nonzero().squeeze(-1)
    shift = (batch.offsets - view.offsets)[1:]  # both sequences end with the response
    mask = view.mask.clone()
    mask[generated] = batch.mask[generated + shift[view.segment_ids[generated]]]
    return view.with_(mask=mask)


def _move(values: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Return the values at the tokens of mask `source` at those of mask `target`, 0 elsewhere."""
    moved = values.new_zeros(target.numel(), *values.shape[1:])
    moved[target] = values[source]
    return moved
