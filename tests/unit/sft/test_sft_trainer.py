"""The loop of supervised fine-tuning without processes: batches, validation, checkpoints and resuming."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console

from verl.checkpoint.manifest import CheckpointDir
from verl.data.micro_batches import MicroBatchLimit
from verl.data.samplers import SequentialSampler, ShuffledSampler
from verl.sft.examples import Example, RankBatch
from verl.sft.trainer import SFTDataLoader, SFTTrainer, split_batch
from verl.tracking.console import Console
from verl.trainer.checkpointing import Checkpointer
from verl.trainer.restarts import RestartTracker
from verl.trainer.shutdown import StopController
from verl.trainer.train_loop import LoopSchedule, TrainLoop

pytestmark = pytest.mark.unit

ROWS = [Example(np.full(length, row, np.int32), np.arange(length) > 0) for row, length in enumerate([3, 5, 2, 4, 6])]
CUT = partial(split_batch, ranks=2, limit=MicroBatchLimit(samples=2, tokens=None))


def examples_of(parts: Sequence[RankBatch]) -> list[Example]:
    return [example for part in parts for micro_batch in part for example in micro_batch]


class FakeModel:
    """Remembers what it was trained on; the loss of a token is its row."""

    def __init__(self) -> None:
        self.trained: list[list[int]] = []
        self.saved_at: list[Mapping[str, Any]] = []

    async def update(self, parts: Sequence[RankBatch]) -> dict[str, float]:
        rows = [int(example.tokens[0]) for example in examples_of(parts)]
        self.trained.append(sorted(rows))
        return {
            "train/loss": 1.0,
            "train/grad_norm": math.nan if 4 in rows else 1.0,
            "train/skipped_steps": float(4 in rows),
        }

    async def loss(self, parts: Sequence[RankBatch]) -> tuple[float, float]:
        masked = [example.tokens[example.mask] for example in examples_of(parts)]
        return sum(float(tokens.sum()) for tokens in masked), sum(float(len(tokens)) for tokens in masked)

    async def save(self, directory: str, trainer: Mapping[str, Any], *, is_last: bool = False) -> None:
        self.saved_at.append(trainer["data"])

    async def poll_save(self, *, wait: bool) -> float | None:
        return 0.0


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.lines.append((step, dict(metrics)))

    def close(self) -> None: ...


def loop_of(
    tmp_path: Path,
    model: FakeModel,
    loader: SFTDataLoader,
    schedule: LoopSchedule,
    version: int = 0,
    validation: Sequence[Example] | None = None,
):
    out = io.StringIO()
    console = Console(out=rich.console.Console(file=out))
    checkpointer = Checkpointer(model, CheckpointDir(tmp_path), console)
    log = Log()
    task, restarts = SFTTrainer(loader, model, validation), RestartTracker(console)
    return TrainLoop(task, schedule, checkpointer, log, console, restarts, version), log, out


async def test_every_row_is_trained_once_an_epoch_and_the_position_is_saved(tmp_path: Path) -> None:
    model, order = FakeModel(), ShuffledSampler(len(ROWS), seed=3)
    loop, log, _ = loop_of(tmp_path, model, SFTDataLoader(ROWS, order, 2, CUT), LoopSchedule(2, 5, save_every=2))
    await loop.fit()
    drawn = [[order.row(position) for position in range(2 * step, 2 * step + 2)] for step in range(5)]
    assert model.trained == [sorted(rows) for rows in drawn]
    assert sorted(row for rows in model.trained for row in rows) == sorted(list(range(5)) * 2)
    assert [state["position"] for state in model.saved_at] == [4, 8, 10]
    steps = [metrics for _, metrics in log.lines if "train/loss" in metrics]
    assert [metrics["data/position"] for metrics in steps] == [2, 4, 6, 8, 10]
    assert steps[0]["plan/tokens"] == sum(len(ROWS[row].tokens) for row in drawn[0])
    assert steps[0]["plan/trained_tokens"] == steps[0]["plan/tokens"] - 2


async def test_a_resumed_run_goes_on_at_its_position_also_with_another_batch_size(tmp_path: Path) -> None:
    model = FakeModel()
    loader = SFTDataLoader(ROWS, SequentialSampler(len(ROWS)), 3, CUT, start=4, version=2)
    loop, _, _ = loop_of(tmp_path, model, loader, LoopSchedule(3, 4), version=2)
    await loop.fit()
    assert model.trained == [[0, 1, 4], [2, 3, 4]]


async def test_validation_is_the_mean_over_all_trained_tokens_before_in_between_and_at_the_end(tmp_path: Path) -> None:
    model = FakeModel()
    loader, schedule = (
        SFTDataLoader(ROWS, SequentialSampler(5), 2, CUT),
        LoopSchedule(2, 3, validate_every=2, validate_last=True),
    )
    loop, log, _ = loop_of(tmp_path, model, loader, schedule, validation=ROWS)
    await loop.fit()
    found = [(step, metrics["val/loss"]) for step, metrics in log.lines if "val/loss" in metrics]
    mean = sum(row * (len(example.tokens) - 1) for row, example in enumerate(ROWS)) / sum(
        len(e.tokens) - 1 for e in ROWS
    )
    assert [step for step, _ in found] == [0, 2, 3]
    assert all(loss == pytest.approx(mean) for _, loss in found)


async def test_without_a_frequency_there_is_a_validation_at_the_end_alone(tmp_path: Path) -> None:
    schedule = LoopSchedule(1, 3, validate_first=False, validate_last=True)
    loop, log, _ = loop_of(
        tmp_path,
        FakeModel(),
        SFTDataLoader(ROWS, SequentialSampler(5), 1, CUT),
        schedule,
        validation=ROWS,
    )
    await loop.fit()
    assert [step for step, metrics in log.lines if "val/loss" in metrics] == [3]


async def test_a_run_that_is_asked_to_stop_saves_after_the_step_in_progress(tmp_path: Path) -> None:
    stopping = StopController()

    class Asked(FakeModel):
        async def update(self, parts: Sequence[RankBatch]) -> dict[str, float]:
            stopping.request_stop()
            return await super().update(parts)

    model = Asked()
    loop, _, out = loop_of(tmp_path, model, SFTDataLoader(ROWS, SequentialSampler(5), 1, CUT), LoopSchedule(1, 5))
    await loop.fit(stopping)
    assert [state["position"] for state in model.saved_at] == [1]
    assert "saved and stopped after step 1" in out.getvalue()


async def test_a_skipped_step_is_reported(tmp_path: Path) -> None:
    loop, _, out = loop_of(
        tmp_path, FakeModel(), SFTDataLoader(ROWS, SequentialSampler(5), 1, CUT, start=4), LoopSchedule(1, 1)
    )
    await loop.fit()
    assert "step 1 did not change the weights: the gradient norm is nan" in out.getvalue()


async def test_a_loader_asked_out_of_order_returns_the_requested_batch() -> None:
    loader = SFTDataLoader(ROWS, SequentialSampler(5), 2, CUT)
    (first, _), (third, _) = await loader.take(0), await loader.take(2)
    assert sorted({int(token) for example in examples_of(first) for token in example.tokens}) == [0, 1]
    assert sorted({int(token) for example in examples_of(third) for token in example.tokens}) == [0, 4]
    loader.close()
