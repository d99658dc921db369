"""Noise of the size of rounding, and the timeout of the groups of a mesh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from verl.memory_plan.model_memory import PROBE_TOKENS
from verl.training.fsdp.rounding import NOISE, rounding_noise
from verl.training.process_group import build_mesh, close_process_group, init_process_group
from verl.weights.probe import LEAST_TOLERANCES, TOLERANCES, Probe

pytestmark = pytest.mark.unit


def test_noise_is_that_of_the_dtype_and_ends_with_the_context() -> None:
    torch.manual_seed(0)
    layer, rows = nn.Linear(64, 512), torch.randn(32, 64)
    exact = layer(rows)
    for dtype, scale in NOISE.items():
        if dtype == "float32":
            continue  # the noise is that of the pass itself
        with rounding_noise(layer, dtype):
            noisy = layer(rows)
        with rounding_noise(layer, dtype):
            assert torch.equal(layer(rows), noisy), "the same noise each time"
        relative = (noisy - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert float(relative.detach()) == pytest.approx(scale, rel=0.05)
    assert torch.equal(layer(rows), exact)


def test_global_random_numbers_are_not_touched() -> None:
    layer, before = nn.Linear(4, 4), torch.get_rng_state()
    with rounding_noise(layer, "bfloat16"):
        layer(torch.ones(1, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_pass_in_the_same_dtype_needs_half_of_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NOISE, "bfloat16", 0.2)  # far more than the pass itself rounds
    torch.manual_seed(0)
    layer, rows = nn.Linear(64, 512).bfloat16(), torch.randn(32, 64).bfloat16()
    with rounding_noise(layer, "bfloat16"):
        noisy = layer(rows).float()
    exact = layer(rows).float()
    relative = (noisy - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert float(relative.detach()) == pytest.approx(0.1, rel=0.05)


def test_every_dtype_has_a_tolerance_and_the_plan_counts_the_tokens_of_the_probe() -> None:
    assert NOISE.keys() == TOLERANCES.keys() == LEAST_TOLERANCES.keys()
    assert sum(map(len, Probe.random(50, tolerance=1.0).sequences)) == PROBE_TOKENS


@pytest.fixture
def one_rank() -> Iterator[None]:
    init_process_group(0, 1, "127.0.0.1", 0, timeout_seconds=4321)
    yield
    close_process_group()


def test_the_groups_of_a_mesh_have_the_timeout_of_the_process_group(one_rank: None) -> None:
    mesh = build_mesh("cpu", (1, 1), ("replicate", "shard"))
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout for group in mesh.get_all_groups()]
    assert [timeout.total_seconds() for timeout in timeouts] == [4321, 4321]
    assert dist.new_group()._get_backend(torch.device("cpu")).options._timeout.total_seconds() != 4321
