"""Loading a model verifies its packed log-probs against those of transformers."""

import pytest
import torch
import transformers
from tiny import load_packed

from verl.errors import EngineError
from verl.training.fsdp import model as packed_model

pytestmark = pytest.mark.unit

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 48,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2-tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": 3}),
    "gemma2-softcaps": (
        transformers.Gemma2Config,
        {"head_dim": 16, "sliding_window": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 0.5},
    ),
    "granite-divided": (transformers.GraniteConfig, {"logits_scaling": 4.0}),
    "cohere-scaled": (transformers.CohereConfig, {"logit_scale": 0.25}),
    "gpt2": (transformers.GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "phi-bias": (transformers.PhiConfig, {}),
    "starcoder2": (transformers.Starcoder2Config, {}),
}


def saved(tmp_path, family, **changes):
    kind, options = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**TINY, **options, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that a wrong scale or mask shows
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probs_are_the_models_own(tmp_path, family):
    model = load_packed(saved(tmp_path, family), dtype=torch.float32)
    assert len(model.layers()) == 2


@pytest.mark.parametrize(
    ("family", "rates"),
    [
        ("gpt2", {"embd_pdrop": 0.5, "attn_pdrop": 0.5, "resid_pdrop": 0.5}),
        ("qwen2-tied", {"attention_dropout": 0.5}),
        ("phi-bias", {"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
        ("starcoder2", {"attention_dropout": 0.5, "residual_dropout": 0.5, "embedding_dropout": 0.5}),
    ],
)
def test_training_and_evaluation_give_the_same_log_probs(tmp_path, family, rates):
    model = load_packed(saved(tmp_path, family, **rates), dtype=torch.float32)
    tokens, positions = torch.arange(8), torch.arange(8)
    calm = model.eval()(tokens, positions, positions > 0, [8], 1.0).logprobs
    trained = model.train()(tokens, positions, positions > 0, [8], 1.0).logprobs
    torch.testing.assert_close(trained, calm)


def loud(tmp_path):
    """A model whose logits are so large that bfloat16 keeps no digit behind the point of them."""
    path = saved(tmp_path, "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    model.save_pretrained(path)
    return path


def test_a_model_with_large_logits_is_not_refused_for_rounding(tmp_path):
    load_packed(loud(tmp_path), dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [loud, lambda path: saved(path, "llama")], ids=["loud", "plain"])
def test_sequences_that_see_each_other_stop_the_start(tmp_path, monkeypatch, make, dtype):
    real = packed_model.packing_kwargs
    monkeypatch.setattr(packed_model, "packing_kwargs", lambda lengths, device: real([sum(lengths)], device))
    with pytest.raises(EngineError, match="log-probs of packed sequences differ"):
        load_packed(make(tmp_path), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_unsupported_head_is_refused(tmp_path, monkeypatch, dtype):
    path = saved(tmp_path, "llama")
    real = transformers.LlamaForCausalLM.forward

    def tripled(self, *args, **kwargs):
        output = real(self, *args, **kwargs)
        output.logits = output.logits * 3
        return output

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", tripled)
    with pytest.raises(EngineError, match=r"\(llama\): log-probs of packed sequences differ"):
        load_packed(path, dtype=dtype)


def test_layers_with_a_recurrent_state_are_refused(tmp_path):
    path = saved(tmp_path, "qwen3")
    config = transformers.AutoConfig.from_pretrained(path)
    config.layer_types = ["full_attention", "chunked_attention"]
    config.attention_chunk_size = 4
    config.save_pretrained(path)
    with pytest.raises(EngineError, match="chunked_attention cannot be trained on packed"):
        load_packed(path, dtype=torch.float32)


def test_a_path_without_a_model_is_named(tmp_path):
    with pytest.raises(EngineError, match="cannot be loaded"):
        load_packed(str(tmp_path), dtype=torch.float32)
