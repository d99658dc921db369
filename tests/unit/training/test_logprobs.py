import pytest
import torch

from tests.acceptance.speed import vocabulary
from verl.training.kernels.logprobs import LastLayer, token_logprobs, vocabulary_kl
from verl.training.settings import default_chunk

pytestmark = pytest.mark.unit


def plain(hidden, weight, targets, bias=None, scale=1.0, softcap=None, temperature=1.0):
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def inputs(n=13, h=5, v=17, dtype=torch.float64, bias=False):
    torch.manual_seed(0)
    made = [torch.randn(n, h, dtype=dtype), torch.randn(v, h, dtype=dtype)]
    made += [torch.randn(v, dtype=dtype)] if bias else []
    return [tensor.requires_grad_() for tensor in made], torch.randint(v, (n,))


def gradients(outputs, leaves, use):
    torch.manual_seed(1)
    terms = [(torch.randn_like(out) * out).sum() for out, used in zip(outputs, use, strict=True) if used]
    return torch.autograd.grad(sum(terms), leaves)


@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("use", [(1, 1), (1, 0), (0, 1)], ids=["both", "logprobs", "entropy"])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"softcap": 1.5, "scale": 0.5, "temperature": 1.3}, {"scale": 2.0}], ids=str
)
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_give_the_values_and_gradients_of_plain_ones(chunk, use, options, bias):
    (hidden, weight, *rest), targets = inputs(bias=bias)
    named = {"bias": rest[0]} if rest else {}
    kwargs = {"temperature": options.get("temperature", 1.0), "chunk": chunk}
    shape = {key: value for key, value in options.items() if key != "temperature"}
    ours = token_logprobs(LastLayer(hidden, weight, **named, **shape), targets, **kwargs)
    plain_outputs = plain(hidden, weight, targets, **named, **options)
    torch.testing.assert_close(ours, plain_outputs)
    leaves = [hidden, weight, *rest]
    torch.testing.assert_close(gradients(ours, leaves, use), gradients(plain_outputs, leaves, use))


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "scale": 0.5}], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True])
def test_the_kl_over_the_vocabulary_has_the_value_and_gradient_of_its_sum(chunk, options, temperature, bias):
    (hidden, weight, *rest), _ = inputs(bias=bias)
    torch.manual_seed(2)
    other = LastLayer(torch.randn(13, 7, dtype=torch.float64), torch.randn(17, 7, dtype=torch.float64), scale=0.3)
    ours = vocabulary_kl(LastLayer(hidden, weight, *rest, **options), other, temperature=temperature, chunk=chunk)

    def log_p(hidden, weight, bias=None, scale=1.0, softcap=None):
        every = torch.arange(len(weight))
        return torch.stack(
            [plain(hidden, weight, every[k].expand(len(hidden)), bias, scale, softcap, temperature)[0] for k in every],
            -1,
        )

    log_probs = log_p(hidden, weight, *rest, **options)
    plain_outputs = (log_probs.exp() * (log_probs - log_p(other.hidden, other.weight, scale=0.3))).sum(-1)
    torch.testing.assert_close(ours, plain_outputs)
    leaves = [hidden, weight, *rest]
    torch.testing.assert_close(gradients([ours], leaves, [1]), gradients([plain_outputs], leaves, [1]))


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("floor", [-0.5, -3.0, -100.0])
def test_a_floor_of_log_probs_bounds_the_ratios_of_the_kl_and_not_its_probabilities(chunk, floor):
    (hidden, weight), _ = inputs()
    torch.manual_seed(2)
    other = LastLayer(torch.randn(13, 7, dtype=torch.float64), torch.randn(17, 7, dtype=torch.float64), floor=floor)
    ours = vocabulary_kl(LastLayer(hidden, weight), other, chunk=chunk)
    log_p, log_q = (hidden @ weight.T).log_softmax(-1), (other.hidden @ other.weight.T).log_softmax(-1)
    ratio = (log_p.clamp(min=floor) - log_q.clamp(min=floor)).detach()
    assert (ratio == 0).any() == (floor > -10), "the example has tokens below the floor, unless it is low"
    plain_kl = (log_p.exp() * ratio).sum(-1)
    torch.testing.assert_close(ours, plain_kl)
    leaves = [hidden, weight]
    torch.testing.assert_close(gradients([ours], leaves, [1]), gradients([plain_kl], leaves, [1]))
    if floor == -100.0:
        exact = vocabulary_kl(LastLayer(hidden, weight), other._replace(floor=None), chunk=chunk)
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "scale": 0.5}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sums_of_squared_probabilities_come_with_the_same_log_probs_and_gradients(chunk, options, dtype):
    (hidden, weight), targets = inputs(dtype=dtype)
    layer = LastLayer(hidden, weight, **options)
    *ours, squares = token_logprobs(layer, targets, temperature=0.7, chunk=chunk, with_squares=True)
    expected = token_logprobs(layer, targets, temperature=0.7, chunk=chunk)
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))
    torch.testing.assert_close(squares, layer.logprobs(0.7).exp().square().sum(-1))
    assert not squares.requires_grad
    leaves = [hidden, weight]
    torch.testing.assert_close(gradients(ours, leaves, [1, 1]), gradients(expected, leaves, [1, 1]), rtol=0, atol=0)


def test_a_model_has_no_kl_to_itself_and_no_gradient():
    (hidden, weight), _ = inputs()
    layer = LastLayer(hidden, weight)
    kl = vocabulary_kl(layer, LastLayer(hidden.detach(), weight.detach()))
    assert float(kl.abs().max()) < 1e-12
    assert all(float(each.abs().max()) < 1e-12 for each in torch.autograd.grad(kl.sum(), [hidden, weight]))


def test_no_positions_give_no_log_probs_and_zero_gradients():
    (hidden, weight), targets = inputs(n=0)
    logprobs, entropy = token_logprobs(LastLayer(hidden, weight), targets)
    assert logprobs.shape == entropy.shape == (0,)
    d_hidden, d_weight = torch.autograd.grad(logprobs.sum() + entropy.sum(), [hidden, weight])
    assert d_hidden.shape == hidden.shape
    assert not d_weight.any()


def test_a_frozen_head_gets_no_gradient():
    (hidden, weight), targets = inputs()
    weight.requires_grad_(False)
    token_logprobs(LastLayer(hidden, weight), targets)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_low_precision_inputs_give_float32_log_probs_and_gradients_of_the_input_dtype():
    (hidden, weight), targets = inputs(dtype=torch.bfloat16)
    logprobs, entropy = token_logprobs(LastLayer(hidden, weight), targets, chunk=4)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected, _ = plain(hidden.float(), weight.float(), targets)
    torch.testing.assert_close(logprobs, expected, atol=0.05, rtol=0.02)
    logprobs.sum().backward()
    assert weight.grad.dtype == hidden.grad.dtype == torch.bfloat16


def test_the_acceptance_script_measures_equal_results_at_a_small_size(tmp_path):
    paths = [tmp_path / f"{method}.pt" for method in vocabulary.METHODS]
    for method, path in zip(vocabulary.METHODS, paths, strict=True):
        assert vocabulary.measure(method, 7, path, vocabulary=33).keys() == {"bytes", "seconds"}
    differences = vocabulary.relative_differences(*map(torch.load, paths))
    assert differences.keys() == {"hidden", "weight", "logprobs"}
    assert max(differences.values()) <= vocabulary.GRADIENT_LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_float32_bring_half_precision_log_probs_closer_to_exact_ones(dtype):
    torch.manual_seed(0)
    hidden = torch.randn(64, 32).to(dtype).requires_grad_()
    weight = torch.randn(200, 32).to(dtype).requires_grad_()
    targets = torch.randint(200, (64,))
    exact, _ = plain(hidden.double(), weight.double(), targets)
    half, _ = token_logprobs(LastLayer(hidden, weight), targets)
    full, _ = token_logprobs(LastLayer(hidden, weight).to(torch.float32), targets)
    assert float((full - exact).abs().max()) < 1e-4
    assert float((full - exact).abs().mean()) < 0.01 * float((half - exact).abs().mean())
    grads = torch.autograd.grad(full.sum(), [hidden, weight])
    assert [grad.dtype for grad in grads] == [dtype, dtype]
    for grad, expected in zip(grads, torch.autograd.grad(exact.sum(), [hidden, weight]), strict=True):
        torch.testing.assert_close(grad, expected, rtol=0.02, atol=0.02)


def test_chunks_have_more_positions_on_accelerators_unless_their_size_is_given():
    layer = LastLayer(torch.empty(9000, 8, device="meta"), torch.empty(151_936, 8, device="meta"))
    assert [rows.stop - rows.start for rows, _ in layer.chunks(None)] == [4096] * 3
    assert len(list(layer.chunks(3000))) == 3
    assert default_chunk("cpu", 151_936) == 110
