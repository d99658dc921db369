"""What the host does for an engine: it copies micro-batches, and may run the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import free_port
from tiny import save_family

from verl.algorithms.objective import sft
from verl.data.flat_batch import FlatBatch
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group

pytestmark = pytest.mark.unit


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FsdpEngine]:
    init_process_group(0, 1, "127.0.0.1", free_port())
    save_family("Qwen2", tmp_path)
    yield FsdpEngine(FsdpSettings(str(tmp_path)))
    dist.destroy_process_group()


def test_a_pass_copies_each_micro_batch_once(engine: FsdpEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[FlatBatch] = []
    real = FlatBatch.to

    def to(batch: FlatBatch, device: torch.device | str) -> FlatBatch:
        copied.append(batch)
        return real(batch, device)

    monkeypatch.setattr(FlatBatch, "to", to)
    tokens = torch.arange(12)
    batch = FlatBatch(tokens, torch.tensor([0, 5, 12]), (tokens != 0) & (tokens != 5))
    parts = batch.split([[0], [1]])
    engine.forward(parts)
    assert [id(each) for each in copied] == [id(each) for each in parts]
    copied.clear()
    engine.update(parts, sft)
    assert [id(each) for each in copied] == [id(each) for each in parts]


def test_the_optimizer_step_has_its_own_threads(engine: FsdpEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, before, real = list[int](), torch.get_num_threads(), engine._step

    def step(lr: float, *, has_tokens: bool) -> tuple[float, bool]:
        threads.append(torch.get_num_threads())
        return real(lr, has_tokens=has_tokens)

    monkeypatch.setattr(engine, "_step", step)
    batch = FlatBatch(torch.arange(5), torch.tensor([0, 5]), torch.arange(5) > 0)
    for count in (None, before + 1):
        engine._step_threads = count
        engine.update([batch], sft)
    assert threads == [before, before + 1]
    assert torch.get_num_threads() == before
