"""A critic is the backbone of any causal model with a scalar head."""

import pytest
import torch
import transformers
from tiny import load_packed, tiny_qwen2

from verl.algorithms.aggregate import MODES, count_totals
from verl.algorithms.objective import ValueObjective
from verl.algorithms.settings import AlgorithmSettings
from verl.data.flat_batch import FlatBatch
from verl.errors import EngineError
from verl.training.fsdp import model as packed_model

pytestmark = pytest.mark.unit

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64, "pad_token_id": 0}
FAMILIES = {
    "qwen2": tiny_qwen2(),
    "qwen2-tied": tiny_qwen2(tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64),
    "gemma2-softcaps": transformers.Gemma2Config(
        **SMALL, num_key_value_heads=1, intermediate_size=64, head_dim=16, sliding_window=3, attn_logit_softcapping=2.0
    ),
    "cohere-tied": transformers.CohereConfig(**SMALL, intermediate_size=64),
    "phi": transformers.PhiConfig(**SMALL, intermediate_size=64),
}


def saved(tmp_path, config, kind=transformers.AutoModelForCausalLM, **changes):
    torch.manual_seed(0)
    config = type(config)(**{**config.to_dict(), **changes})
    model = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that a wrong mask shows
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path)
    return str(tmp_path)


def scored(tmp_path, kind="Token", dtype=torch.float32):
    """A critic whose head is not zero, from a classifier of one label."""
    auto = getattr(transformers, f"AutoModelFor{kind}Classification")
    return load_packed(saved(tmp_path, tiny_qwen2(), auto, num_labels=1), dtype=dtype, head="value")


def mini_batch():
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 9, 9, 3, 12, 4]
    offsets, total = torch.tensor([0, *lengths]).cumsum(0), sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.6
    mask[offsets[:-1]] = False
    mask[offsets[3] : offsets[4]] = False  # one sequence in which nothing was generated
    old, returns = torch.randn(2, total, generator=generator)
    tokens = torch.randint(64, (total,), generator=generator)
    return FlatBatch(tokens, offsets, mask, values=old, returns=returns)


def values_of(model, batch):
    return model(batch.tokens, batch.positions, batch.mask, batch.lengths.tolist(), 1.0).values


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_critic_has_the_backbone_of_the_causal_model_and_predicts_zero(tmp_path, family):
    path = saved(tmp_path, FAMILIES[family])
    model = load_packed(path, dtype=torch.float32, head="value")
    values = values_of(model, mini_batch())
    assert values.requires_grad
    assert values.dtype == torch.float32
    assert not values.any()
    assert len(model.layers()) == 2

    causal = transformers.AutoModelForCausalLM.from_pretrained(path)
    prefix, size = causal.base_model_prefix, causal.config.hidden_size
    kept = dict(model.hf.named_parameters())
    assert kept.pop("score.weight").shape == (1, size)
    assert kept.pop("score.bias").shape == (1,)
    backbone = {f"{prefix}.{name}": weight for name, weight in causal.base_model.named_parameters()}
    assert kept.keys() == backbone.keys()
    assert all(torch.equal(kept[name], weight) for name, weight in backbone.items())


def test_a_value_is_what_the_head_makes_of_the_state_before_its_token(tmp_path):
    model, batch = scored(tmp_path), mini_batch()
    backbone = transformers.AutoModel.from_pretrained(tmp_path)
    weight, bias = model.hf.score.weight[0], model.hf.score.bias[0]
    expected = torch.zeros(batch.num_tokens)
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        states = backbone(batch.tokens[None, start:end]).last_hidden_state[0]
        for t in range(start + 1, end):
            if batch.mask[t]:
                expected[t] = states[t - 1 - start] @ weight + bias
    assert expected.abs().max() > 1
    torch.testing.assert_close(values_of(model, batch), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["Token", "Sequence"])
def test_the_head_of_a_classifier_of_one_label_is_taken_over(tmp_path, kind):
    model = scored(tmp_path, kind)
    classifier = getattr(transformers, f"AutoModelFor{kind}Classification").from_pretrained(tmp_path)
    kept, reference = model.hf.state_dict(), classifier.state_dict()
    assert kept.keys() == reference.keys()
    assert all(torch.equal(kept[name], weight) for name, weight in reference.items())
    assert values_of(model, mini_batch()).any()


def test_a_head_with_several_labels_is_not_used_as_value_head(tmp_path):
    path = saved(tmp_path, tiny_qwen2(), transformers.AutoModelForSequenceClassification, num_labels=3)
    assert not values_of(load_packed(path, dtype=torch.float32, head="value"), mini_batch()).any()


def test_the_head_is_kept_and_computed_in_float32(tmp_path):
    model = scored(tmp_path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in model.hf.score.parameters()} == {torch.float32}
    assert {weight.dtype for weight in model.backbone.parameters()} == {torch.bfloat16}
    values = values_of(model, mini_batch())
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


@pytest.mark.parametrize("mode", MODES)
def test_gradients_do_not_depend_on_how_the_batch_is_cut_and_packed(tmp_path, mode):
    model, batch = scored(tmp_path), mini_batch()
    objective = ValueObjective(AlgorithmSettings(value_clip=0.5, value_agg_mode=mode, scale=12.0))
    totals = count_totals(batch.mask, batch.offsets)

    def gradients(cut):
        model.zero_grad()
        for part in batch.split(cut):
            output = model(part.tokens, part.positions, part.mask, part.lengths.tolist(), 1.0)
            objective(output, part, totals)[0].backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    whole = gradients([[0, 1, 2, 3, 4, 5]])
    assert all(gradient.any() for gradient in whole.values())
    for cut in [[[5, 3, 1, 4, 0, 2]], [[4], [2, 0], [5, 3, 1]], [[index] for index in range(6)]]:
        for name, gradient in gradients(cut).items():
            torch.testing.assert_close(gradient, whole[name], atol=1e-4 * float(whole[name].abs().max()), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequences_that_see_each_other_are_refused_though_all_values_are_zero(tmp_path, monkeypatch, dtype):
    real = packed_model.packing_kwargs
    monkeypatch.setattr(packed_model, "packing_kwargs", lambda lengths, device: real([sum(lengths)], device))
    with pytest.raises(EngineError, match=r"\(qwen2\): hidden states of packed sequences differ"):
        load_packed(saved(tmp_path, tiny_qwen2()), dtype=dtype, head="value")
