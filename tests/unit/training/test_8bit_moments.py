"""8-bit moments: nearest codes, steps close to those of AdamW, bits that survive a checkpoint, and their size."""

import pytest
import torch

from verl.training.optim.low_precision import BLOCK, LowPrecisionAdamW, code_table, dequantize, quantize

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_has_256_values_up_to_one(signed):
    table = code_table(signed, CPU)
    assert len(table.unique()) == 256
    assert bool((table == 0).any())
    assert float(table.max()) == 1.0
    assert float(table.abs()[table != 0].min()) == pytest.approx(5.5e-7 if signed else 3.25e-7, rel=1e-5)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("columns", [40, BLOCK, 300])
def test_values_get_the_nearest_code_of_their_block(signed, columns):
    torch.manual_seed(0)
    values = torch.randn(5, columns) * 10 ** torch.randn(5, columns)
    values = values if signed else values.square()
    codes, scales = quantize(values, signed=signed)
    assert codes.dtype == torch.uint8
    assert scales.shape == (5, -(-columns // BLOCK))
    for row in range(5):
        for block, part in enumerate(values[row].split(BLOCK)):
            scale = part.abs().max()
            assert scales[row, block] == scale
            distances = (part[:, None] / scale - code_table(signed, CPU)).abs()
            chosen = codes[row, block * BLOCK :][: len(part)].long()
            is_raised = (chosen == 1) & (not signed)  # a positive value is not rounded to 0
            nearest = distances.min(1).values
            best = distances.gather(1, chosen[:, None]).squeeze(1)
            assert bool(((best <= nearest + 1e-7) | is_raised).all())
    restored = dequantize(codes, scales, signed=signed)
    assert bool((restored - values).abs().le(0.04 * scales.max(1, keepdim=True).values).all())


def test_zeros_stay_zeros_and_small_second_moments_do_not_become_zero():
    values = torch.zeros(2, BLOCK)
    values[1, :3] = torch.tensor([1.0, 1e-9, 1e-30])
    restored = dequantize(*quantize(values, signed=False), signed=False)
    assert torch.equal(restored == 0, values == 0)


def test_the_moments_of_rows_do_not_depend_on_the_rows_of_other_shards():
    torch.manual_seed(0)
    values = torch.randn(7, 300)
    whole = quantize(values, signed=True)
    parts = [quantize(part, signed=True) for part in values.split([3, 4])]
    for index in range(2):
        assert torch.equal(whole[index], torch.cat([part[index] for part in parts]))
    codes, scales = quantize(values[:0], signed=True)  # a rank without rows
    assert codes.shape == (0, 300)
    assert dequantize(codes, scales, signed=True).shape == (0, 300)


def minimize(optimizer, weight, steps):
    target = torch.linspace(-1, 1, weight.numel()).view(weight.shape).to(weight.dtype)
    for _ in range(steps):
        weight.grad = 2 * (weight.detach() - target)
        optimizer.step()
    return float((weight.detach() - target).square().mean())


def test_losses_fall_as_with_adamw():
    losses = {}
    for name, build in (("8bit", LowPrecisionAdamW), ("32bit", torch.optim.AdamW)):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(64, 100))
        options = {"quantizes_moments": True} if name == "8bit" else {}
        losses[name] = minimize(build([weight], lr=0.02, weight_decay=0.0, **options), weight, 60)
    assert losses["32bit"] < 0.5
    assert losses["8bit"] == pytest.approx(losses["32bit"], rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_optimizer_continues_with_the_same_bits(dtype):
    def run(steps, state=None):
        torch.manual_seed(3)
        weight = torch.nn.Parameter(torch.randn(64, 100).to(dtype))
        bias = torch.nn.Parameter(torch.randn(64).to(dtype))
        rounds = dtype == torch.bfloat16
        optimizer = LowPrecisionAdamW([weight, bias], lr=1e-2, quantizes_moments=True, rounds_stochastically=rounds)
        if state is not None:
            weight.data, bias.data, _ = state[0].clone(), state[1].clone(), torch.set_rng_state(state[3])
            optimizer.load_state_dict(state[2])
        for _ in range(steps):
            weight.grad, bias.grad = weight.detach() * 2, bias.detach() * 2
            optimizer.step()
        return weight.detach().clone(), bias.detach().clone(), optimizer.state_dict(), torch.get_rng_state()

    uninterrupted, resumed = run(5), run(2, run(3))
    assert torch.equal(uninterrupted[0], resumed[0])
    assert torch.equal(uninterrupted[1], resumed[1])


def test_matrices_take_two_bytes_per_parameter_and_small_tensors_eight():
    matrix, bias = torch.nn.Parameter(torch.randn(32, 512)), torch.nn.Parameter(torch.randn(512))
    optimizer = LowPrecisionAdamW([matrix, bias], quantizes_moments=True)
    matrix.grad, bias.grad = torch.randn(32, 512), torch.randn(512)
    optimizer.step()
    sizes = [sum(each.nbytes for each in optimizer.state[p].values() if each.ndim) for p in (matrix, bias)]
    assert sizes[0] / matrix.numel() == 2 + 2 * 4 / BLOCK
    assert sizes[1] / bias.numel() == 8
