"""Muon against torch's own, against singular value decompositions, and which parameters it takes."""

import pytest
import torch
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl.training.fsdp.model import PackedCausalLM
from verl.training.fsdp.settings import FsdpSettings
from verl.training.optim.muon import Muon, orthogonalize
from verl.training.optim.optimizers import build_optimizer
from verl.training.settings import Schedule

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("shape", [(16, 16), (24, 64), (64, 24)])
def test_singular_values_become_about_one_and_singular_vectors_stay(shape):
    torch.manual_seed(0)
    u, _, vt = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    matrix = u @ torch.diag(torch.linspace(2.0, 30.0, min(shape), dtype=torch.float64)) @ vt
    core = u.mT @ orthogonalize(matrix) @ vt.mT
    assert bool((core.diagonal() > 0.65).all())
    assert bool((core.diagonal() < 1.25).all())
    torch.testing.assert_close(core, torch.diag(core.diagonal()), atol=1e-9, rtol=0)


def test_each_expert_of_a_stack_is_a_matrix_of_its_own():
    torch.manual_seed(0)
    stack = torch.randn(3, 8, 20) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    torch.testing.assert_close(orthogonalize(stack), torch.stack([orthogonalize(each) for each in stack]))


def test_a_zero_gradient_does_not_change_the_weights():
    assert torch.equal(orthogonalize(torch.zeros(4, 6)), torch.zeros(4, 6))


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_steps_are_those_of_torch(monkeypatch, adjust_lr, shape):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's would compute in bfloat16
    torch.manual_seed(0)
    start, bias = torch.randn(shape), torch.randn(8)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    our_bias, their_bias = torch.nn.Parameter(bias.clone()), torch.nn.Parameter(bias.clone())
    options = {"lr": 1e-2, "weight_decay": 0.1}
    optimizers = [
        Muon([ours], [our_bias], momentum=0.9, adjust_lr=adjust_lr, **options),
        torch.optim.Muon([theirs], momentum=0.9, adjust_lr_fn=adjust_lr, **options),
        torch.optim.AdamW([their_bias], fused=True, **options),
    ]
    for _ in range(4):
        grad, bias_grad = torch.randn(shape), torch.randn(8)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        our_bias.grad, their_bias.grad = bias_grad.clone(), bias_grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert float((ours.detach() - start).abs().mean()) > 1e-3
    assert torch.equal(our_bias, their_bias)


def test_an_update_is_as_large_as_one_of_adamw():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(48, 96))
    weight.grad = torch.randn(48, 96)
    Muon([weight], [], lr=1e-2).step()
    assert float(weight.square().mean().sqrt()) == pytest.approx(0.2e-2, rel=0.2)


def groups_of(hf):
    """Return the names of the parameters that Muon takes, and of those that AdamW takes."""
    model = PackedCausalLM(hf)
    settings = FsdpSettings("", optimizer="muon", schedule=Schedule(1e-3))
    names = {id(parameter): name for name, parameter in model.hf.named_parameters()}
    groups = build_optimizer(model, settings).param_groups
    assert [group["use_muon"] for group in groups] == [True, False]
    return [{names[id(parameter)] for parameter in group["params"]} for group in groups]


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_matrices_of_layers_and_adamw_all_others(tied):
    hidden, others = groups_of(Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=tied)))
    assert "model.layers.0.self_attn.q_proj.weight" in hidden
    assert "model.layers.1.mlp.down_proj.weight" in hidden
    assert all(name.startswith("model.layers.") and name.endswith("proj.weight") for name in hidden)
    assert others >= {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"}
    assert tied or "lm_head.weight" in others


def test_muon_takes_the_experts_of_an_moe():
    sizes = {key: value for key, value in tiny_qwen2().to_diff_dict().items() if key.endswith("size")}
    config = Qwen3MoeConfig(
        **sizes,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    hf = Qwen3MoeForCausalLM(config)
    hidden, others = groups_of(hf)
    experts = {name for name, each in hf.named_parameters() if "experts" in name and each.ndim >= 2}
    assert experts
    assert experts <= hidden
    assert not any("experts" in name for name in others)
