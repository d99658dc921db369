"""The estimate of time: what it grows with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from public_models import MODELS

from verl.memory_plan.accelerators import DEVICES
from verl.memory_plan.device_memory import EngineMemory, MemoryPlan
from verl.memory_plan.megatron_memory import MegatronMemory
from verl.memory_plan.model_memory import ModelMemory, PassSize
from verl.memory_plan.step_time import (
    ALL_REDUCE_SECONDS,
    HOST_SECONDS,
    Cluster,
    Workload,
    estimate_seconds,
    estimate_step,
    suggest_split,
)
from verl.models.model_shape import ModelShape
from verl.training.fsdp.settings import FsdpSettings
from verl.training.megatron.settings import MegatronSettings

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


def test_a_step_is_all_phases_without_the_save() -> None:
    times = seconds()
    expected = sum(times.values()) - times["save"]
    assert estimate_step(RUN, Cluster(DEVICES["H100"], 1, 8), LOAD) == pytest.approx(expected)


def test_devices_of_an_engine_wait_for_each_other_in_every_layer() -> None:
    few = Workload(8, 16, 512)
    narrow, wide = (
        seconds(load=few, run=replace(RUN, engine=EngineMemory(SHAPE, 0.5, width)))["generation"] for width in (1, 8)
    )
    assert wide > narrow / 8 + 512 * 2 * SHAPE.layers * ALL_REDUCE_SECONDS
    small = ModelShape.from_config(MODELS["Qwen2.5-0.5B"])
    one, two = (
        seconds(load=few, run=replace(RUN, engine=EngineMemory(small, 0.5, width)))["generation"] for width in (1, 2)
    )
    assert two > one  # a small model is read quickly


def test_an_engine_across_machines_is_slower_than_one_within() -> None:
    run = replace(RUN, engine=EngineMemory(SHAPE, 0.5, 16))
    within, across = (estimate_seconds(run, Cluster(DEVICES["H100"], *size), LOAD) for size in ((1, 16), (2, 8)))
    assert across["generation"] > 2 * within["generation"]


def test_an_engine_needs_host_time_for_every_token() -> None:
    small = ModelShape.from_config(MODELS["Qwen2.5-0.5B"])
    load = Workload(8 * 1024, 16, 128)
    times = seconds(load=load, run=replace(RUN, engine=EngineMemory(small, 0.8)))
    assert times["generation"] > 1024 * 128 * HOST_SECONDS


def test_offloaded_weights_and_moments_are_copied() -> None:
    def with_settings(**settings: bool) -> dict[str, float]:
        model = replace(RUN.models["actor"], settings=replace(SETTINGS, **settings))
        return seconds(load=replace(LOAD, updates=4), run=replace(RUN, models={"actor": model}))

    plain, moments, weights, policy = (
        with_settings(),
        with_settings(optimizer_offload=True),
        with_settings(param_offload=True),
        with_settings(offload_policy=True),
    )
    assert moments["update"] - plain["update"] == pytest.approx(4 * 2 * SHAPE.parameters / 0.7 / 50e9, rel=1e-3)
    assert weights["update"] - plain["update"] == pytest.approx(4 * SHAPE.parameters / 0.7 / 50e9, rel=1e-3)
    assert all(weights[phase] > plain[phase] for phase in ("log-probs", "update", "weight sync"))
    assert policy["update"] > max(moments["update"], weights["update"])


def test_ranks_that_share_sequences_or_matrices_exchange_more_the_more_they_are() -> None:
    def update(settings: FsdpSettings | MegatronSettings) -> float:
        engine = ModelMemory if isinstance(settings, FsdpSettings) else MegatronMemory
        model = engine(SHAPE, settings, 8, SIZE, SIZE)  # type: ignore[arg-type]
        return seconds(run=replace(RUN, models={"actor": model}))["update"]

    ulysses = [update(replace(SETTINGS, sequence_parallel_size=size)) for size in (1, 2, 4)]
    megatron = MegatronSettings("m", compute_dtype="bfloat16", gradient_checkpointing=True)
    tensor = [update(replace(megatron, tensor_parallel_size=size)) for size in (1, 2, 4)]
    assert ulysses[0] < ulysses[1] < ulysses[2]
    assert tensor[0] < tensor[1] < tensor[2]
