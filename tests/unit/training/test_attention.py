import pytest
import torch
from tiny import tiny_qwen2

from verl.errors import EngineError
from verl.training.kernels import attention
from verl.training.kernels.attention import Packing, activate_flash_attention, packed_attention, packing_kwargs

pytestmark = pytest.mark.unit

HEADS, KV_HEADS, DIM = 4, 2, 8


def one_by_one(query, key, value, lengths, scaling, window, softcap):
    """Compute attention for each sequence separately."""
    parts = []
    for q, k, v in zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True):
        k, v = (states.repeat_interleave(HEADS // KV_HEADS, dim=1) for states in (k, v))
        scores = q @ k.transpose(-1, -2) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        i, j = torch.meshgrid(torch.arange(q.shape[2]), torch.arange(q.shape[2]), indexing="ij")
        seen = (j <= i) & (i - j < (window or 10**9))
        parts.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v)
    return torch.cat(parts, dim=2).transpose(1, 2)


def states(total):
    torch.manual_seed(0)
    made = [torch.randn(1, total, heads, DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [tensor.transpose(1, 2).requires_grad_() for tensor in made]


@pytest.mark.parametrize("lengths", [[5], [3, 3, 3], [1, 7, 7, 2, 7], [4, 4, 1, 1]], ids=str)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_packed_equals_one_by_one_forward_and_backward(lengths, window, softcap):
    qkv = states(sum(lengths))
    ours, _ = packed_attention(
        torch.nn.Module(),
        *qkv,
        None,
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        packing=Packing(packing_kwargs(lengths, "cpu")),
    )
    expected = one_by_one(*qkv, lengths, 0.3, window, softcap)
    torch.testing.assert_close(ours, expected)
    weight = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad((weight * ours).sum(), qkv), torch.autograd.grad((weight * expected).sum(), qkv)
    )


def test_neighbors_of_equal_length_are_one_run():
    packed = packing_kwargs([4, 4, 2, 4], "cpu")
    assert packed["runs"] == ((2, 4), (1, 2), (1, 4))
    assert packed["cu_seq_lens_q"].tolist() == [0, 4, 8, 10, 14]
    assert packed["max_length_q"] == 4


def test_a_run_is_a_view_of_the_flat_array(monkeypatch):
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, *args, **kwargs):
        seen.append((q.shape, q.untyped_storage().data_ptr()))
        return real(q, k, v, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    query, key, value = states(12)
    packed_attention(torch.nn.Module(), query, key, value, None, packing=Packing(packing_kwargs([4, 4, 4], "cpu")))
    assert seen == [((3, HEADS, 4, DIM), query.untyped_storage().data_ptr())]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "without the boundaries"),
        ({"s_aux": torch.zeros(1), "packing": Packing(packing_kwargs([4], "cpu"))}, "attention uses s_aux"),
    ],
)
def test_what_cannot_be_packed_is_refused(arguments, message):
    with pytest.raises(EngineError, match=message):
        packed_attention(torch.nn.Module(), *states(4), None, **arguments)


def test_an_additional_mask_is_refused():
    with pytest.raises(EngineError, match="only causal attention"):
        packed_attention(
            torch.nn.Module(), *states(4), torch.ones(1, 1, 4, 4), packing=Packing(packing_kwargs([4], "cpu"))
        )


def pretend(monkeypatch, *, capability=(9, 0), spec="installed"):
    """Return the implementations that are activated on a GPU with this capability; None: torch's own."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(attention, "find_spec", {attention.FLASH_ATTENTION_3: spec}.get)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", chosen.append)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: chosen.append(None))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return chosen


@pytest.fixture
def gpu(monkeypatch):
    """A device whose tensors are on the CPU."""
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *args, device=None, **options: ones(*args, **options))
    monkeypatch.setattr(attention, "packing_kwargs", lambda lengths, device: packing_kwargs(lengths, "cpu"))
    return "cuda"


def test_hopper_gpus_use_flash_attention_3_if_it_is_installed(monkeypatch, gpu):
    config, sizes = tiny_qwen2(), []
    chosen = pretend(monkeypatch)
    monkeypatch.setitem(attention._KERNELS, "cpu", lambda query, *args, **options: sizes.append(query.shape) or query)
    activate_flash_attention(gpu, config)
    assert (chosen, sizes) == (["FA3"], [(9, 1, 32)])
    for options in ({"capability": (10, 0)}, {"capability": (8, 0)}, {"spec": None}):
        chosen = pretend(monkeypatch, **options)
        activate_flash_attention(gpu, config)
        assert chosen == []
    activate_flash_attention("cpu", config)
    assert chosen == []


def test_torch_keeps_its_own_kernel_where_flash_attention_3_fails(monkeypatch, gpu, caplog):
    def fail(*args, **options):
        raise RuntimeError("head size 32 is not supported")

    chosen = pretend(monkeypatch)
    monkeypatch.setitem(attention._KERNELS, "cpu", fail)
    activate_flash_attention(gpu, tiny_qwen2())
    assert chosen == ["FA3", None]
    assert "head size 32 is not supported" in caplog.text
