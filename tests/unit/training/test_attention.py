import pytest
import torch

from verl.errors import EngineError
from verl.training.kernels.attention import Packing, packed_attention, packing_kwargs

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
