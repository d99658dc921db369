"""The memory of a device with all models of a rank and an engine, and the settings that are proposed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from public_models import MODELS

from verl.memory_plan.accelerators import GIB
from verl.memory_plan.device_memory import EngineMemory, MemoryPlan
from verl.memory_plan.model_memory import ModelMemory, PassSize
from verl.memory_plan.suggestions import Changes, SettingsChange, find_changes
from verl.models.model_shape import ModelShape
from verl.training.fsdp.settings import FsdpSettings

pytestmark = pytest.mark.unit

SHAPE = ModelShape.from_config(MODELS["Qwen2.5-14B"])
SIZE = PassSize(8192, 4096)
DEVICE = 80 * GIB


def make_run(engine: dict[str, Any] | None = None, **settings: Any) -> MemoryPlan:
    fsdp = replace(FsdpSettings("m", compute_dtype="bfloat16", gradient_checkpointing=True), **settings)
    reference = ModelMemory(SHAPE, FsdpSettings("m", trainable=False, compute_dtype="bfloat16"), 8, SIZE)
    models = {"actor": ModelMemory(SHAPE, fsdp, 8, SIZE, SIZE), "reference": reference}
    return MemoryPlan(models, EngineMemory(SHAPE, **{"share": 0.5} | (engine or {})))


def test_models_at_rest_and_the_engine_add_up_in_generation() -> None:
    usage = make_run().phases(DEVICE)["generation"]
    assert usage.weights == pytest.approx(2 * 4 * SHAPE.parameters / 8, rel=1e-6)
    assert usage.engine_weights == 2 * SHAPE.parameters
    assert usage.engine_weights + usage.kv_cache <= 0.5 * DEVICE


def test_a_sleeping_engine_uses_its_memory_only_to_generate_and_to_load() -> None:
    awake, asleep = (make_run({"sleeps": sleeps}).phases(DEVICE) for sleeps in (False, True))
    assert asleep["generation"] == awake["generation"]
    assert asleep["update"].kv_cache == asleep["update"].engine_weights == 0
    assert (asleep["weight sync"].kv_cache, asleep["weight sync"].engine_weights) == (0, 2 * SHAPE.parameters)


def test_an_engine_without_memory_for_its_cache_is_a_problem() -> None:
    problems = make_run({"share": 0.3}).problems(DEVICE)
    assert "the engine has no memory left for its cache after 27.5 GiB of weights" in problems["generation"]
    assert make_run({"share": 0.3, "width": 2}).engine.cache(DEVICE) > 0  # type: ignore[union-attr]


def test_a_cache_is_divided_by_devices_down_to_one_head() -> None:
    sizes = [EngineMemory(SHAPE, 0.5, width=width).token_bytes for width in (1, 2, 8, 16)]
    assert sizes[0] == 2 * 2 * 48 * 8 * 128
    assert sizes[1:] == [sizes[0] // 2, sizes[0] // 8, sizes[0] // 8]


OPTIONS = [
    SettingsChange({"param": True}, "useless here"),
    SettingsChange({"optimizer": True}, "copies"),
    SettingsChange({"share": 0.45}, "less cache"),
    SettingsChange({"share": 0.4}, "less cache"),
]


def evaluate(values: Changes) -> MemoryPlan:
    return make_run({"share": values.get("share", 0.5)}, optimizer_offload=values.get("optimizer", False))


def test_only_the_changes_that_are_needed_are_proposed() -> None:
    assert evaluate({}).shortfall(DEVICE) > 0
    changes = find_changes(evaluate, OPTIONS, DEVICE)
    assert [dict(change.values) for change in changes] == [{"optimizer": True}, {"share": 0.45}]
    assert not evaluate({key: value for change in changes for key, value in change.values.items()}).problems(DEVICE)


def test_nothing_is_proposed_if_it_fits_or_cannot_fit() -> None:
    assert find_changes(evaluate, OPTIONS, 200 * GIB) == []
    assert find_changes(evaluate, OPTIONS, 40 * GIB) == []


def test_a_value_that_is_changed_again_is_proposed_once() -> None:
    def shrinking(values: Changes) -> MemoryPlan:
        return make_run({"share": values.get("share", 0.9), "sleeps": False}, optimizer_offload=True)

    changes = find_changes(shrinking, [SettingsChange({"share": 0.7}, ""), SettingsChange({"share": 0.45}, "")], DEVICE)
    assert [dict(change.values) for change in changes] == [{"share": 0.45}]
