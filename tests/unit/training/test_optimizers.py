"""Rounding without bias, and the scale of float16 losses."""

from functools import partial

import pytest
import torch

from verl.training.optim.low_precision import LowPrecisionAdamW, round_stochastically
from verl.training.optim.optimizers import LossScaler

pytestmark = pytest.mark.unit

StochasticAdamW = partial(LowPrecisionAdamW, rounds_stochastically=True)


def test_rounding_at_random_is_to_a_neighbor_and_right_on_average():
    torch.manual_seed(0)
    value = torch.full((100_000,), 1.0 + 0.3 / 128)  # bfloat16 has 1 and 1 + 1/128 around it
    rounded = round_stochastically(value).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 1 / 128}
    assert float((rounded - 1).mean()) == pytest.approx(0.3 / 128, rel=0.02)
    exact = torch.tensor([0.0, 1.0, -2.5, 2.0**100])
    assert round_stochastically(exact).float().tolist() == exact.bfloat16().float().tolist()
    negative = round_stochastically(-value).float()
    assert float((negative + 1).mean()) == pytest.approx(-0.3 / 128, rel=0.02)


def test_small_updates_move_bfloat16_weights_on_average_as_they_move_float32_ones():
    torch.manual_seed(0)
    moved = {}
    for kind, dtype in ((torch.optim.AdamW, torch.float32), (StochasticAdamW, torch.bfloat16)):
        weight = torch.nn.Parameter(torch.ones(20_000, dtype=dtype))
        optimizer = kind([weight], lr=1e-5, weight_decay=0.0)
        for _ in range(20):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[dtype] = float((weight.detach().double() - 1).mean())
    assert moved[torch.float32] == pytest.approx(-2e-4, rel=1e-2)
    assert moved[torch.bfloat16] == pytest.approx(moved[torch.float32], rel=0.1)


def test_a_stochastic_optimizer_resumes_bit_identically():
    def run(steps, state=None):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 64).bfloat16())
        optimizer = StochasticAdamW([weight], lr=1e-2)
        if state is not None:
            weight.data, _ = state[0].clone(), torch.set_rng_state(state[2])
            optimizer.load_state_dict(state[1])
        for _ in range(steps):
            weight.grad = weight.detach() * 2
            optimizer.step()
        return weight.detach().clone(), optimizer.state_dict(), torch.get_rng_state()

    torch.manual_seed(1)
    whole = run(6)
    torch.manual_seed(1)
    resumed = run(3, run(3))
    assert torch.equal(whole[0], resumed[0])


def test_the_scale_is_halved_by_overflow_and_doubled_after_a_while():
    scaler = LossScaler("float16", scale=1024.0, interval=3)
    for is_finite, expected in ((True, 1024), (False, 512), (True, 512), (True, 512), (True, 1024), (True, 1024)):
        scaler.record(is_finite=is_finite)
        assert scaler.scale == expected
    other = LossScaler("float16")
    other.load_state(scaler.state())
    assert other.state() == scaler.state()
    for _ in range(100):
        other.record(is_finite=False)
    assert other.scale == 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_data_types_do_not_scale_the_loss(dtype):
    scaler = LossScaler(dtype)
    for is_finite in (True, False) * 300:
        scaler.record(is_finite=is_finite)
    assert scaler.scale == 1.0
