"""Routers of mixtures: a given choice is used, with the weights and gradients of the current router."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import free_port
from tiny import save_family
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from verl.algorithms.objective import sft
from verl.data.flat_batch import FlatBatch
from verl.errors import EngineError
from verl.training.fsdp import FsdpEngine
from verl.training.model_loader import load_model
from verl.training.process_group import init_process_group
from verl.training.settings import FsdpSettings

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

LAYERS, EXPERTS, TOP = 2, 4, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    init_process_group(0, 1, "127.0.0.1", free_port())
    yield save_family("Qwen3-MoE", tmp_path_factory.mktemp("moe"))
    dist.destroy_process_group()


class Recorder(FsdpEngine):
    def _step(self, lr, *, has_tokens):
        self.gradient = {name: p.grad.full_tensor().clone() for name, p in self.model.named_parameters()}
        self.optimizer.zero_grad(set_to_none=True)
        return 1.0, False


def make_batch(**fields):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([7, 3, 12, 5])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    mask = torch.ones(int(offsets[-1]), dtype=torch.bool)
    mask[offsets[:-1]] = False
    return FlatBatch(torch.randint(64, mask.shape, generator=generator), offsets, mask, **fields)


def other_choice(count):
    """Two different experts for every token and layer, chosen at random."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :TOP].to(torch.int16)


def flat(gradient):
    return torch.cat([part.flatten() for part in gradient.values()])


def distance(one, other):
    return float((flat(one) - flat(other)).norm() / flat(other).norm())


def test_replaying_the_routers_own_choice_changes_nothing(folder):
    plain, replaying = Recorder(FsdpSettings(folder)), Recorder(FsdpSettings(folder, router_replay=True))
    batch = make_batch()
    [expected], [output] = plain.forward([batch]), replaying.forward([batch])
    assert expected.routed_experts is None
    assert output.routed_experts.shape == (batch.num_tokens, LAYERS, TOP)
    batch = batch.with_(routed_experts=output.routed_experts)
    assert torch.equal(replaying.forward([batch])[0].logprobs, expected.logprobs)
    plain.update([batch], sft)
    replaying.update([batch], sft)
    assert distance(replaying.gradient, plain.gradient) < 1e-6


def test_a_given_choice_is_used_except_where_it_is_unknown(folder):
    engine = FsdpEngine(FsdpSettings(folder, router_replay=True, trainable=False))
    batch = make_batch()
    own = engine.forward([batch])[0].routed_experts
    given = other_choice(batch.num_tokens)
    given[::3] = -1
    output = engine.forward([batch.with_(routed_experts=given)])[0]
    assert torch.equal(output.routed_experts[1::3], given[1::3])
    assert torch.equal(output.routed_experts[0, 0], own[0, 0])  # the first token sees no replayed one
    assert not torch.allclose(output.logprobs, engine.forward([batch])[0].logprobs)


def test_replayed_experts_get_the_probabilities_of_the_current_router(folder):
    engine = FsdpEngine(FsdpSettings(folder, router_replay=True, trainable=False))
    batch = make_batch(routed_experts=other_choice(27))
    router = engine._routing._routers[0]
    seen = []
    router.register_forward_hook(lambda module, args, output: seen.append(output))
    engine.forward([batch])
    logits, scores, chosen = seen[0]
    probs = logits.softmax(-1)
    expected = torch.stack([probs[row, experts] for row, experts in enumerate(chosen)])
    assert torch.equal(chosen, batch.routed_experts[:, 0].long())
    assert torch.allclose(scores, expected / expected.sum(-1, keepdim=True) if router.norm_topk_prob else expected)


@pytest.mark.parametrize("settings", [{"router_replay": True}, {"router_aux_loss_coef": 0.5}])
def test_gradient_checkpointing_and_micro_batches_do_not_change_the_gradient(folder, settings):
    batch = make_batch(routed_experts=other_choice(27))
    engine = Recorder(FsdpSettings(folder, **settings))
    metrics = engine.update([batch], sft)
    expected = engine.gradient
    for parts in ([[2, 0], [3, 1]], [[0], [1], [], [3], [2]]):
        split = engine.update(batch.split(parts), sft)
        assert distance(engine.gradient, expected) < 1e-5
        assert split == pytest.approx(metrics, rel=1e-5)
    engine = Recorder(FsdpSettings(folder, gradient_checkpointing=True, **settings))
    engine.update(batch.split([[2, 0], [3, 1]]), sft)
    assert distance(engine.gradient, expected) < 1e-5


def test_the_auxiliary_loss_is_that_of_transformers_averaged_over_layers(folder):
    batch, coefficient = make_batch(), 0.7
    plain, balanced = Recorder(FsdpSettings(folder)), Recorder(FsdpSettings(folder, router_aux_loss_coef=coefficient))
    batch = batch.with_(routed_experts=balanced.forward([batch])[0].routed_experts)
    plain.update([batch], sft)
    metrics = balanced.update([batch], sft)

    model = load_model(folder, dtype=torch.float32)
    gates = [layer.mlp.gate for layer in model.hf.model.layers]
    logits = []
    for gate in gates:
        gate.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    model(batch.tokens, batch.positions, batch.mask, batch.lengths.tolist(), 1.0)
    loss = sum(load_balancing_loss_func((each,), EXPERTS, TOP) for each in logits) / LAYERS
    assert metrics["actor/router_aux_loss"] == pytest.approx(loss.item(), rel=1e-5)
    for index, grad in enumerate(torch.autograd.grad(loss, [gate.weight for gate in gates])):
        name = f"hf.model.layers.{index}.mlp.gate.weight"
        added = (balanced.gradient[name] - plain.gradient[name]) / coefficient
        assert torch.allclose(added, grad, atol=1e-6)


def test_a_dense_model_is_refused_by_name(folder, tmp_path):
    path = save_family("Qwen3", tmp_path)
    with pytest.raises(EngineError, match=f"{path}.*no mixture of experts"):
        FsdpEngine(FsdpSettings(path, router_replay=True))


def test_float32_logits_of_a_tied_head_are_closer_to_float32_training(folder, tmp_path):
    path = save_family("Qwen3", tmp_path, tie_word_embeddings=True)
    settings = FsdpSettings(path, trainable=False)
    batch = make_batch()
    exact = FsdpEngine(settings).forward([batch])[0].logprobs
    half, full = (
        FsdpEngine(replace(settings, compute_dtype="bfloat16", fp32_lm_head=fp32)).forward([batch])[0].logprobs
        for fp32 in (False, True)
    )
    assert float((full - exact).abs().mean()) < float((half - exact).abs().mean())
