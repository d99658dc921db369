"""The law of the packed path, family by family: sequences laid end to end get the log-probs and gradients that each has
alone in the plain model of transformers, also where they are longer than its window."""

import pytest
import torch
import transformers
from tiny import FAMILIES, WINDOW, load_packed, save_family

from verl.weights.bucket import check_names, to_hf

pytestmark = pytest.mark.unit

LENGTHS = [3, 2 * WINDOW + 5, 1, WINDOW + 1, 7]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """The packed model and the plain one, of the same weights."""
    path = save_family(request.param, tmp_path_factory.mktemp("family"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return load_packed(path, dtype=torch.float32), plain


def sequences():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(64, (length,), generator=generator) for length in LENGTHS]


def alone(plain):
    for tokens in sequences():
        log_p = plain(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        yield log_p.gather(-1, tokens[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def packed(model):
    tokens, positions = torch.cat(sequences()), torch.cat([torch.arange(length) for length in LENGTHS])
    output = model(tokens, positions, positions > 0, LENGTHS, 1.0)
    return output.logprobs[positions > 0], output.entropy[positions > 0]


def test_packed_sequences_have_the_log_probs_and_entropies_that_each_has_alone(pair):
    model, plain = pair
    with torch.no_grad():
        expected = [torch.cat(parts) for parts in zip(*alone(plain), strict=True)]
        results = packed(model)
    for numbers, right in zip(results, expected, strict=True):
        torch.testing.assert_close(numbers, right, atol=1e-5, rtol=1e-5)


def test_packed_sequences_have_the_gradients_that_each_has_alone(pair):
    model, plain = pair
    torch.manual_seed(1)
    weights = torch.randn(sum(LENGTHS) - len(LENGTHS))
    (weights * torch.cat([logprobs for logprobs, _ in alone(plain)])).sum().backward()
    (weights * packed(model.train())[0]).sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.eval().hf.named_parameters():
        scale = float(expected[name].abs().max())
        assert scale > 0, name
        torch.testing.assert_close(parameter.grad / scale, expected[name] / scale, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["Mistral", "Gemma 2", "Gemma 3", "Phi 3"])
def test_a_window_hides_what_is_further_back(name, tmp_path):
    """Else the tests above would prove nothing of it."""
    model = load_packed(save_family(name, tmp_path, **_only_windows(name)), dtype=torch.float32)
    length = 3 * WINDOW
    tokens, positions = torch.arange(length) % 64, torch.arange(length)
    with torch.no_grad():
        before = model(tokens, positions, positions > 0, [length], 1.0).logprobs
        tokens[0] = 50
        after = model(tokens, positions, positions > 0, [length], 1.0).logprobs
    reach = 2 * (WINDOW - 1) + 1  # two layers, up to the state that the next token is drawn from
    assert torch.equal(before[reach + 1 :], after[reach + 1 :])
    assert not torch.equal(before[reach : reach + 1], after[reach : reach + 1])


def _only_windows(name):
    return {"layer_types": ["sliding_attention"] * 2} if name.startswith("Gemma") else {}


def test_weights_have_the_names_and_numbers_of_the_checkpoint(pair):
    from safetensors.torch import load_file

    model, plain = pair
    named = [(name, parameter.detach()) for name, parameter in model.hf.named_parameters()]
    results, expected = dict(to_hf(model.hf, named)), load_file(f"{plain.name_or_path}/model.safetensors")
    assert results.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in results.items())
    check_names(model.hf, "here")
