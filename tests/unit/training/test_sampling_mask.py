"""Log-probs over the tokens that sampling kept: equal to a plain masked softmax, and to those of the engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import free_port
from tiny import save_family
from torch import Tensor

from tests.policy_steps import SAMPLES, Table, step_of
from verl.agents.transcript import Transcript
from verl.algorithms.objective import PolicyObjective
from verl.algorithms.settings import AlgorithmSettings
from verl.data.flat_batch import FlatBatch
from verl.rollout.hf import HfEngine
from verl.rollout.settings import RolloutEngineSettings
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.kernels.logprobs import LastLayer, token_logprobs, vocabulary_kl
from verl.training.policy.prime import PrimeRewardModel
from verl.training.policy.trainer import PolicyTrainer
from verl.training.process_group import init_process_group
from verl.types import SamplingParams

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

SHAPES: list[dict[str, Any]] = [{}, {"softcap": 1.5, "scale": 0.5}, {"softcap": 30.0}, {"scale": 2.0}]


def restrict(layer: LastLayer, row: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the kept ids of a position without repetitions, and the log-softmax over them alone in float64."""
    assert layer.kept is not None
    ids = layer.kept[row].unique()
    logits = layer.hidden[row].double() @ layer.weight.double()[ids].T
    if layer.bias is not None:
        logits = logits + layer.bias.double()[ids]
    logits = logits * layer.scale
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    return ids, (logits / temperature).log_softmax(-1)


def make_case(seed: int, dtype: torch.dtype, *, bias: bool, **shape: Any) -> tuple[LastLayer, Tensor, list[Tensor]]:
    """Return a layer at random positions with random kept ids, the drawn tokens, and the leaves of gradients."""
    random = torch.Generator().manual_seed(seed)
    count, hidden, vocabulary = 7, 5, 19
    leaves = [torch.randn(size, hidden, generator=random, dtype=dtype) for size in (count, vocabulary)]
    leaves += [torch.randn(vocabulary, generator=random, dtype=dtype)] if bias else []
    leaves = [leaf.requires_grad_() for leaf in leaves]
    width = int(torch.randint(1, 9, (), generator=random))
    kept = torch.randint(vocabulary, (count, width), generator=random)  # some are repeated
    layer = LastLayer(leaves[0], leaves[1], leaves[2] if bias else None, kept=kept, **shape)
    return layer, kept[:, int(torch.randint(width, (), generator=random))], leaves


cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "dtype": st.sampled_from([torch.float64, torch.float32]),
        "bias": st.booleans(),
        "shape": st.sampled_from(SHAPES),
        "temperature": st.sampled_from([1.0, 0.6]),
        "chunk": st.sampled_from([1, 3, 100]),
    }
)


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_log_probs_entropies_and_gradients_are_those_of_a_softmax_over_the_kept_tokens(case: dict[str, Any]) -> None:
    layer, targets, leaves = make_case(case["seed"], case["dtype"], bias=case["bias"], **case["shape"])
    logprobs, entropy, squares = token_logprobs(
        layer, targets, temperature=case["temperature"], chunk=case["chunk"], with_squares=True
    )
    rows = [restrict(layer, row, case["temperature"]) for row in range(len(targets))]
    expected = torch.stack([log_p[ids == target][0] for (ids, log_p), target in zip(rows, targets, strict=True)])
    expected_entropy = torch.stack([-(log_p.exp() * log_p).sum() for _, log_p in rows])
    tolerance = {"atol": 1e-10, "rtol": 1e-8} if case["dtype"] == torch.float64 else {"atol": 2e-4, "rtol": 2e-4}
    torch.testing.assert_close(logprobs.double(), expected, **tolerance)
    torch.testing.assert_close(entropy.double(), expected_entropy, **tolerance)
    torch.testing.assert_close(
        squares.double(), torch.stack([log_p.exp().square().sum() for _, log_p in rows]), **tolerance
    )
    weights = torch.linspace(-1, 2, len(targets))
    ours = torch.autograd.grad((weights * logprobs - weights.flip(0) * entropy).sum(), leaves)
    own = torch.autograd.grad((weights * expected - weights.flip(0) * expected_entropy).sum(), leaves)
    for one, other in zip(ours, own, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@settings(max_examples=30, deadline=None)
@given(case=cases)
def test_the_exact_kl_is_between_the_distributions_over_the_kept_tokens(case: dict[str, Any]) -> None:
    layer, targets, leaves = make_case(case["seed"], torch.float64, bias=case["bias"], **case["shape"])
    other, _, _ = make_case(case["seed"] + 1, torch.float64, bias=False)
    other = other._replace(kept=layer.kept)
    kl = vocabulary_kl(layer, other, temperature=case["temperature"], chunk=case["chunk"])
    pairs = [[restrict(each, row, case["temperature"])[1] for each in (layer, other)] for row in range(len(targets))]
    expected = torch.stack([(log_p.exp() * (log_p - log_q.detach())).sum() for log_p, log_q in pairs])
    torch.testing.assert_close(kl, expected)
    ours, own = (torch.autograd.grad((kl_of * torch.arange(7)).sum(), leaves) for kl_of in (kl, expected))
    torch.testing.assert_close(ours, own)


def test_with_all_tokens_kept_nothing_changes() -> None:
    layer, targets, leaves = make_case(0, torch.float32, bias=True)
    everything = layer._replace(kept=torch.arange(19).expand(len(targets), -1))
    ours, plain = (token_logprobs(each, targets) for each in (everything, layer._replace(kept=None)))
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    gradients = [torch.autograd.grad(sum(each).sum(), leaves) for each in (ours, plain)]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    init_process_group(0, 1, "127.0.0.1", free_port())
    yield save_family("Qwen2", tmp_path_factory.mktemp("model"))
    dist.destroy_process_group()


SAMPLING = SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, top_k=6, keep_sampling_mask=True)


@pytest.fixture(scope="module")
def batch(path: str) -> FlatBatch:
    return asyncio.run(generate_batch(path))


async def generate_batch(path: str) -> FlatBatch:
    """Return episodes of two turns and two branches each, with equal prompts."""
    engine = HfEngine(RolloutEngineSettings(path, load_format="auto"))
    await engine.start()
    samples = []
    for seed in range(3):
        transcript = Transcript()
        turn = transcript.add([1, 2, 3], await engine.generate([1, 2, 3], replace(SAMPLING, seed=seed)))
        for context in ([7, 8], [9]):  # both continue the first turn
            tokens = [*turn.get_tokens(), *context]
            transcript.add(context, await engine.generate(tokens, replace(SAMPLING, seed=seed)), turn)
        samples += transcript.to_samples(seed, 0, float(seed), {})
    return FlatBatch.from_samples(samples)


@pytest.mark.parametrize("shared_prompts", [False, True])
def test_the_trainer_has_the_log_probs_of_the_engine_however_the_batch_is_cut(
    path: str, batch: FlatBatch, shared_prompts: bool
) -> None:
    assert batch.kept_ids is not None
    assert batch.rollout_logprobs is not None
    assert batch.kept_ids.shape == (batch.num_tokens, 7)
    assert (batch.kept_ids[~batch.mask] == -1).all()
    assert (batch.kept_ids[batch.mask] == batch.tokens[batch.mask, None]).any(-1).all()
    counts = torch.tensor([len(row.unique()) for row in batch.kept_ids[batch.mask]])
    assert counts.min() < counts.max() <= 6, "top_p drops some of the top_k"
    trainer = FsdpEngine(FsdpSettings(path, temperature=0.8, shared_prompts=shared_prompts))
    for cut in ([[0, 1, 2, 3, 4, 5]], [[5], [2, 0], [], [4, 3, 1]]):
        for index, output in zip(cut, trainer.forward(batch.split(cut)), strict=True):
            part = batch.select(index)
            assert part.rollout_logprobs is not None
            torch.testing.assert_close(output.logprobs, part.rollout_logprobs, atol=1e-5, rtol=0)
            assert (output.entropy[part.mask] <= np.log(6) + 1e-5).all()
    [full] = trainer.forward([batch.with_(kept_ids=None)])
    assert float((full.logprobs - batch.rollout_logprobs).abs().max()) > 0.1


def test_an_update_has_the_same_gradient_however_the_batch_is_cut(path: str, batch: FlatBatch) -> None:
    batch = batch.with_(
        old_logprobs=batch.rollout_logprobs,
        ref_logprobs=batch.rollout_logprobs,
        advantages=torch.linspace(-1, 1, batch.num_tokens),
    )
    objective = PolicyObjective(AlgorithmSettings(entropy_coeff=0.1, loss_kl_coef=0.2, loss_kl_type="full"))
    reference = FsdpEngine(FsdpSettings(path, trainable=False))
    metrics = []
    for cut in ([[0, 1, 2, 3, 4, 5]], [[5], [2, 0], [], [4, 3, 1]]):
        trainer = FsdpEngine(FsdpSettings(path, temperature=0.8))
        metrics.append(trainer.update(batch.split(cut), objective, reference=reference))
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)
    assert metrics[0]["actor/grad_norm"] > 0.01
    assert metrics[0]["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-5)


def test_a_critic_does_not_look_at_kept_ids(path: str, batch: FlatBatch) -> None:
    critic = FsdpEngine(FsdpSettings(path, head="value", role="critic"))
    assert critic.forward([batch])[0].values.shape == (batch.num_tokens,)


def test_the_reward_model_of_prime_sees_the_whole_vocabulary() -> None:
    samples = [
        replace(each, kept_ids=np.zeros((int(each.mask.sum()), 3), np.int32) if each.mask.any() else None)
        for each in SAMPLES
    ]
    actor, model, step = Table(), Table(role="process"), step_of(samples)
    prime = PrimeRewardModel(model, Table(seed=1), beta=0.1)
    step.run(PolicyTrainer(actor, AlgorithmSettings("rloo"), prime=prime))
    assert [batch.kept_ids for batch in model.seen] == [None]
    assert actor.seen[0].kept_ids is not None
