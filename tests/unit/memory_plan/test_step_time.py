"""The estimate of time: what it grows with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from public_models import MODELS

from verl.memory_plan.accelerators import DEVICES
from verl.memory_plan.device_memory import EngineMemory, MemoryPlan
from verl.memory_plan.model_memory import ModelMemory, PassSize
from verl.memory_plan.step_time import Cluster, Workload, estimate_seconds, suggest_split
from verl.models.model_shape import ModelShape
from verl.training.fsdp.settings import FsdpSettings

pytestmark = pytest.mark.unit

SHAPE = ModelShape.from_config(MODELS["Qwen2.5-7B"])
SIZE = PassSize(16384, 8192)
SETTINGS = FsdpSettings("m", compute_dtype="bfloat16", gradient_checkpointing=True)
RUN = MemoryPlan({"actor": ModelMemory(SHAPE, SETTINGS, 8, SIZE, SIZE)}, EngineMemory(SHAPE, 0.5))
LOAD = Workload(1024, 512, 512)


def seconds(gpus: int = 8, load: Workload = LOAD, run: MemoryPlan = RUN) -> dict[str, float]:
    return estimate_seconds(run, Cluster(DEVICES["H100"], 1, gpus), load)


def test_an_update_with_checkpointing_computes_four_times_a_forward_pass() -> None:
    times = seconds()
    tokens = 1024 * 1024 / 8
    expected = (2 * SHAPE.active_parameters + 4 * 28 * 3584 * 512) * tokens / (0.4 * 989e12)
    assert times["log-probs"] == pytest.approx(expected, rel=1e-6)
    assert times["update"] == pytest.approx(4 * expected, rel=1e-6)


def test_twice_the_devices_halve_computing_and_more_tokens_take_longer() -> None:
    assert seconds(16)["update"] == pytest.approx(seconds()["update"] / 2, rel=1e-6)
    longer = seconds(load=replace(LOAD, response=4096))
    assert all(longer[phase] > seconds()[phase] for phase in ("generation", "log-probs", "update"))


def test_small_micro_batches_wait_for_weights() -> None:
    tiny = replace(RUN.models["actor"], forward=PassSize(64, 32), update=PassSize(64, 32))
    assert seconds(run=replace(RUN, models={"actor": tiny}))["update"] > 3 * seconds()["update"]


def test_the_split_gives_devices_in_proportion_to_time() -> None:
    times = {"generation": 30.0, "log-probs": 2.0, "update": 8.0}
    assert suggest_split(times, 16, 1) == (12, 4)
    assert suggest_split(times, 16, 8) == (8, 8)
    assert suggest_split(times, 1, 1) is None
