"""The closed-form estimate: what each setting saves. Its accuracy is checked by `make show-budget`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from public_models import MODELS

from verl.memory_plan.model_memory import PHASES, ModelMemory, PassSize, Usage
from verl.models.model_shape import ModelShape
from verl.training.fsdp.settings import FsdpSettings
from verl.training.settings import LoraSettings, default_chunk

pytestmark = pytest.mark.unit

SHAPE = ModelShape.from_config(MODELS["Qwen2.5-7B"])
SETTINGS = FsdpSettings("model", compute_dtype="bfloat16", gradient_checkpointing=True)
SIZE = PassSize(tokens=8192, trained=4096)
SHARD = 4 * SHAPE.parameters // 8


def memory(size: PassSize = SIZE, **changes: object) -> ModelMemory:
    return ModelMemory(SHAPE, replace(SETTINGS, **changes), 8, size, size)  # type: ignore[arg-type]


def test_every_phase_of_a_trained_model_is_estimated() -> None:
    peaks = memory().peaks()
    assert tuple(peaks) == PHASES
    assert peaks["load"] == Usage(weights=SHARD)
    assert max(peaks, key=lambda phase: peaks[phase].total) == "update"


def test_weights_gradients_and_moments_are_divided_by_the_ranks() -> None:
    usage = memory().in_update()
    assert (usage.weights, usage.gradients, usage.moments) == (SHARD, SHARD, 8 * SHAPE.parameters // 8)


def test_a_single_micro_batch_holds_no_gradients_at_the_peak_of_its_layers() -> None:
    assert replace(memory(PassSize(65536, 1024)), micro_batches=1).in_update().gradients == 0


def test_offloading_empties_the_device_between_phases() -> None:
    assert memory().at_rest() == Usage(weights=SHARD, moments=2 * SHARD)
    assert memory(param_offload=True).at_rest() == Usage(moments=2 * SHARD)
    assert memory(param_offload=True, optimizer_offload=True).at_rest() == Usage()
    assert memory(optimizer_offload=True).in_update().total < memory().in_update().total
    policy = memory(offload_policy=True).in_update()
    assert (policy.weights, policy.gradients, policy.moments) == (0, 0, 0)


def test_the_optimizer_step_needs_the_moments_that_it_offloads() -> None:
    tiny = memory(PassSize(16, 8), optimizer_offload=True)
    assert tiny.in_update().total >= 4 * SHARD


def test_gradient_checkpointing_saves_activations() -> None:
    kept = memory().in_update().activations
    assert memory(gradient_checkpointing=False).in_update().activations > 5 * kept


def test_logits_are_counted_in_the_chunks_that_the_kernels_use() -> None:
    size = PassSize(16384, 16384)
    assert memory(size, device="cuda").in_logprobs().logits == 2 * 4 * default_chunk("cuda", 1) * SHAPE.vocabulary
    assert memory(size, device="cuda", logprob_chunk=8192).in_logprobs().logits == 2 * 4 * 8192 * SHAPE.vocabulary


@pytest.mark.parametrize(("optimizer", "per_parameter"), [("adamw", 8.0), ("adamw_8bit", 2.05), ("muon", 4.57)])
def test_moments_depend_on_the_optimizer(optimizer: str, per_parameter: float) -> None:
    usage = memory(optimizer=optimizer).at_rest()
    assert usage.moments / (SHAPE.parameters / 8) == pytest.approx(per_parameter, rel=0.01)


def test_an_adapter_needs_hardly_any_gradients_and_moments() -> None:
    usage = memory(lora=LoraSettings(16)).in_update()
    assert usage.weights == SHARD
    assert usage.moments + usage.gradients < SHARD / 50


def test_a_frozen_model_is_neither_updated_nor_saved() -> None:
    frozen = ModelMemory(SHAPE, replace(SETTINGS, trainable=False), 8, SIZE)
    assert tuple(frozen.peaks()) == ("load", "log-probs")
    assert frozen.at_rest() == Usage(weights=SHARD)
