"""Measuring with fake tensors: the tracker, and a tiny model as one rank of many."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from memory_measure import measure
from memory_tracker import FakeMemoryTracker, MemoryTracker
from public_models import MODELS
from tiny import tiny_qwen2
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from verl.errors import EngineError
from verl.memory_plan.model_memory import PHASES, ModelMemory, PassSize
from verl.models.model_shape import ModelShape
from verl.training.fsdp.settings import FsdpSettings
from verl.training.settings import LoraSettings

pytestmark = pytest.mark.unit


def test_a_memory_tracker_counts_live_storages_and_their_peak() -> None:
    tracker, old = MemoryTracker(), torch.zeros(100)
    tracker.add([old, old.view(10, 10)])
    assert tracker.live == 400
    with tracker.counting():
        new = torch.zeros(1000)
        view = new[:10]
        assert tracker.live == 4400
        del new, view
        gc.collect()
        assert (tracker.live, tracker.reset_peak(), tracker.peak) == (400, 4400, 400)


def test_a_memory_tracker_sees_storages_that_are_emptied_and_refilled() -> None:
    tracker = MemoryTracker()
    with tracker.counting():
        tensor = torch.zeros(1000)
        tensor.untyped_storage().resize_(0)
        assert (tracker.live, tracker.peak) == (0, 4000)
        tensor.untyped_storage().resize_(8000)
        assert (tracker.live, tracker.peak) == (8000, 8000)


def test_under_a_fake_tracker_floats_have_no_memory_and_integers_are_real() -> None:
    tracker = FakeMemoryTracker(FakeTensorMode(allow_non_fake_inputs=True))
    with tracker.counting():
        huge, mask = torch.empty(1 << 40), torch.arange(5) > 2
        assert isinstance(huge, FakeTensor)
        assert huge[mask.nonzero().squeeze(-1)].shape == (2,)
        assert float(huge.sum()) == 1.0
        assert tracker.live >= 4 << 40


TINY = tiny_qwen2(hidden_size=128, vocab_size=512, num_hidden_layers=1, tie_word_embeddings=True).to_dict()


def peaks(**settings: Any) -> dict[str, int]:
    return measure(TINY, FsdpSettings("tiny", **settings), 2, [24, 8], prompt=8, accumulates=False)


def test_a_tiny_model_is_measured_as_one_of_two_ranks() -> None:
    measured, size = peaks(optimizer_offload=True), PassSize(32, 16)
    estimate = ModelMemory(
        ModelShape.from_config(TINY), FsdpSettings("tiny", optimizer_offload=True), 2, size, size, micro_batches=1
    )
    shard = estimate.at_load().total
    assert tuple(measured) == PHASES
    assert measured["load"] == pytest.approx(shard, rel=0.02)
    assert measured["save"] == pytest.approx(shard, rel=0.02)  # the moments are copied one by one
    assert measured["log-probs"] == pytest.approx(estimate.in_logprobs().total, rel=0.1)  # and here they are not
    assert measured["update"] >= 4 * shard
    assert not dist.is_initialized()


def test_what_cannot_be_measured_is_refused() -> None:
    for settings in ({"offload_policy": True}, {"lora": LoraSettings(4)}, {"expert_parallel_size": 2}):
        with pytest.raises(EngineError, match="use the estimate"):
            peaks(**settings)
    with pytest.raises(EngineError, match="model_type nothing"):
        measure({"model_type": "nothing"}, FsdpSettings("tiny"), 2, [8], prompt=2)
    assert not dist.is_initialized()


def test_shards_of_experts_that_are_fewer_than_the_ranks_are_estimated_with_their_padding() -> None:
    config = MODELS["Qwen3-30B-A3B"] | {"num_hidden_layers": 4}
    settings = FsdpSettings("moe", compute_dtype="bfloat16", gradient_checkpointing=True, device="cuda")
    measured = measure(config, settings, 256, [512] * 2, prompt=256)
    size = PassSize(2 * 512, 2 * 256)
    memory = ModelMemory(ModelShape.from_config(config), settings, 256, size, size, 1)
    for phase, usage in memory.peaks().items():
        assert usage.total == pytest.approx(measured[phase], rel=0.1), phase
