"""Tokens per second and the share of the devices' peak."""

from __future__ import annotations

import pytest

from verl.memory_plan.accelerators import find_device
from verl.models.model_shape import ModelShape
from verl.tracking.throughput import Throughput

pytestmark = pytest.mark.unit

PLAN = {"plan/tokens": 6_000.0, "plan/generated_tokens": 4_000.0, "plan/samples": 10.0}
TIMES = {"timing_s/step": 20.0, "timing_s/gen": 8.0, "timing_s/prepare": 2.0, "timing_s/update": 6.0}


def test_tokens_per_second_are_of_the_run_the_device_and_each_phase() -> None:
    assert Throughput(devices=4, rollout_devices=4, epochs=2).measure(PLAN, TIMES) == {
        "perf/throughput": 300.0,
        "perf/throughput_per_device": 75.0,
        "perf/tokens_per_s/gen": 500.0,
        "perf/tokens_per_s/prepare": 3_000.0,
        "perf/tokens_per_s/update": 2_000.0,
    }


def test_the_utilization_counts_six_operations_per_parameter_and_trained_token() -> None:
    shape = ModelShape(vocabulary=100, width=8, mlp=16, layers=2, heads=2, kv_heads=2, head_width=4)
    operations = 2 * shape.active_parameters + 4 * 2 * 8 * 300  # a token attends to half of 600 tokens
    metrics = Throughput(4, 2, 2, shape, peak=1e6).measure(PLAN, TIMES)
    assert metrics["perf/mfu/update"] == pytest.approx(3 * operations * 2_000 / 4e6)
    assert metrics["perf/mfu/gen"] == pytest.approx(operations * 500 / 2e6)


@pytest.mark.parametrize(
    ("name", "found"), [("NVIDIA H100 80GB HBM3", "H100"), ("AMD Instinct MI300X", "MI300X"), ("NVIDIA T4", None)]
)
def test_devices_are_found_by_the_names_of_their_drivers(name: str, found: str | None) -> None:
    device = find_device(name)
    assert (device and device.name) == found
