"""Routers of MoE models: a given choice is used, with the weights and gradients of the current router."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import free_port
from tiny import load_packed, save_family
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from verl.algorithms.objective import sft
from verl.algorithms.settings import AlgorithmSettings
from verl.config.batch_sizes import BatchSizes
from verl.data.flat_batch import FlatBatch
from verl.data.plan import Planner
from verl.errors import EngineError
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.policy.trainer import PolicyTrainer
from verl.training.process_group import init_process_group
from verl.types import Sample, SampleHandle

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

    model = load_packed(folder, dtype=torch.float32)
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
    with pytest.raises(EngineError, match=f"{path}.*not an MoE"):
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


SCORES = [1.0, 0.0, 0.5, 2.0, 0.0, 0.25]  # 3 responses to each of 2 prompts


def make_samples():
    random = np.random.default_rng(0)
    for index, score in enumerate(SCORES):
        length = int(random.integers(4, 12))
        mask, versions = np.arange(length) >= 3, np.zeros(length, np.int32)
        tokens, logprobs = random.integers(64, size=length).astype(np.int32), np.zeros(length, np.float32)
        yield Sample(index // 3, tokens, mask, logprobs, versions, score)


@contextmanager
def gates(model, hook):
    """Call `hook(layer, output)` for every router; what it returns, if anything, is the router's output."""
    handles = [
        layer.mlp.gate.register_forward_hook(lambda module, args, output, index=index: hook(index, output))
        for index, layer in enumerate(model.model.layers)
    ]
    yield
    for handle in handles:
        handle.remove()


def plain_logprobs(model, sample):
    tokens = torch.tensor(sample.tokens, dtype=torch.int64)
    logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return logprobs[torch.from_numpy(sample.mask[1:])]


def plain_loss(model, samples, old, experts):
    """PPO's clipped loss of one sequence after another, with transformers; each layer uses `experts` of its sample."""
    total, scores = 0.0, torch.tensor(SCORES, dtype=torch.float64).view(2, 3)
    advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).flatten()
    for sample, before, chosen, advantage in zip(samples, old, experts, advantages.tolist(), strict=True):

        def force(index, output, chosen=chosen):
            return output[0], output[0].softmax(-1).gather(-1, chosen[index]), chosen[index]

        with gates(model, force if chosen else lambda index, output: None):
            ratio = (plain_logprobs(model, sample) - before).exp()
        losses = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        total += (losses.clamp(max=-3 * advantage) if advantage < 0 else losses).sum()
    return total / sum(int(sample.mask.sum()) for sample in samples)


def test_r2_updates_with_the_experts_of_the_old_log_prob_pass(folder):
    """Between the pass and the update weights change so much that the routers would choose other experts."""
    samples, model = [*make_samples()], AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = PolicyTrainer(Recorder(FsdpSettings(folder, router_replay=True)), AlgorithmSettings())
    handles = [
        SampleHandle(i, sample.group, len(sample.tokens), int(sample.mask.sum()), sample.score, 0, index=i % 3)
        for i, sample in enumerate(samples)
    ]
    [plan] = Planner(1, BatchSizes(2, 2, None)).plan(handles).ranks
    policy.prepare([samples[i] for i in plan.refs], plan)
    experts, old = [], []
    for sample in samples:
        experts.append({})
        with torch.no_grad(), gates(model, lambda index, output: experts[-1].__setitem__(index, output[2])):
            old.append(plain_logprobs(model, sample))
    torch.manual_seed(0)
    with torch.no_grad():
        trained = dict(policy.actor.model.hf.named_parameters())
        for name, parameter in model.named_parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
            trained[name].to_local().copy_(parameter)
    metrics = policy.update(plan)

    gradients = []
    for chosen in (experts, [None] * len(samples)):
        model.zero_grad()
        loss = plain_loss(model, samples, old, chosen)
        loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        if chosen is experts:
            assert metrics["actor/pg_loss"] == pytest.approx(loss.item(), rel=1e-4)
    actual = {name: policy.actor.gradient[f"hf.{name}"] for name in gradients[0]}
    assert distance(actual, gradients[0]) < 1e-4
    assert distance(actual, gradients[1]) > 1e-2, "the routers choose the same experts as before: a weak test"
