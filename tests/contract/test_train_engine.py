"""What every training engine must do, whatever it is made of."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import free_port
from tiny import tiny_qwen2
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2ForCausalLM

from verl.algorithms.objective import PolicyObjective, sft
from verl.checkpoint.save import load, save
from verl.data.batch import FlatBatch
from verl.training.fake import FakeSettings, FakeTrainEngine
from verl.training.fsdp import FsdpEngine, FsdpSettings
from verl.training.group import init_process_group

pytestmark = pytest.mark.contract

VOCABULARY = 64


@pytest.fixture(scope="module")
def group():
    init_process_group(0, 1, "127.0.0.1", free_port())
    yield
    dist.destroy_process_group()


def fsdp(tied, **settings):
    def make(directory):
        torch.manual_seed(0)
        config = tiny_qwen2(vocab_size=VOCABULARY, tie_word_embeddings=tied)
        Qwen2ForCausalLM(config).save_pretrained(directory)
        return FsdpEngine(FsdpSettings(str(directory), lr=1e-2, grad_clip=None, **settings))

    return make


ENGINES = {
    "fake": lambda directory: FakeTrainEngine(FakeSettings(VOCABULARY)),
    "fsdp": fsdp(tied=False),
    "fsdp-tied": fsdp(tied=True),
    "fsdp-checkpointing": fsdp(tied=True, gradient_checkpointing=True),
    "fsdp-bfloat16": fsdp(tied=False, compute_dtype="bfloat16"),
}


@pytest.fixture(params=ENGINES)
def make(request, group, tmp_path):
    return lambda: ENGINES[request.param](tmp_path / "model")


@pytest.fixture
def engine(make):
    return make()


@pytest.fixture
def loose(request):
    """How far the same work, cut differently, may be apart: in bfloat16 some three digits."""
    return 3e-2 if "bfloat16" in request.node.name else 2e-4


def mini_batch():
    torch.manual_seed(1)
    lengths = [5, 9, 9, 3, 12, 4]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    total = sum(lengths)
    mask = torch.rand(total) < 0.6
    mask[offsets[:-1]] = False
    mask[offsets[3] : offsets[4]] = False  # one sequence in which nothing was generated
    return FlatBatch(
        tokens=torch.randint(VOCABULARY, (total,)),
        offsets=offsets,
        mask=mask,
        old_logprobs=-4 + 0.3 * torch.randn(total),
        ref_logprobs=-4 + 0.3 * torch.randn(total),
        advantages=torch.randn(total),
    )


OBJECTIVE = PolicyObjective(agg_mode="seq-mean-token-mean", entropy_coeff=0.1, kl_coef=0.2)
CUTS = [[[0, 1, 2, 3, 4, 5]], [[4], [2, 0], [], [5, 3, 1]], [[3], [5, 4, 2, 1, 0]]]


def test_log_probs_and_entropies_stand_where_the_mask_is_and_are_zero_elsewhere(engine):
    batch = mini_batch()
    (output,) = engine.forward([batch])
    for values in (output.logprobs, output.entropy):
        assert values.shape == batch.tokens.shape
        assert values.dtype == torch.float32
        assert not values.requires_grad
        assert not values[~batch.mask].any()
    assert (output.logprobs[batch.mask] < 0).all()
    assert (output.entropy[batch.mask] > 0).all()
    assert (output.entropy <= math.log(VOCABULARY) + 1e-4).all()


def test_forward_does_not_depend_on_the_cut(engine, loose):
    batch = mini_batch()
    (whole,) = engine.forward([batch])
    for cut in CUTS:
        for indices, output in zip(cut, engine.forward(batch.split(cut)), strict=True):
            expected = batch.with_(old_logprobs=whole.logprobs, ref_logprobs=whole.entropy).select(indices)
            torch.testing.assert_close(output.logprobs, expected.old_logprobs, atol=loose, rtol=loose)
            torch.testing.assert_close(output.entropy, expected.ref_logprobs, atol=loose, rtol=loose)


def test_temperature_flattens_the_distribution(engine):
    batch = mini_batch()
    (one,), (hot,) = engine.forward([batch]), engine.forward([batch], temperature=5.0)
    assert (hot.entropy[batch.mask] > one.entropy[batch.mask]).all()


def test_metrics_and_new_weights_do_not_depend_on_the_cut(make, loose):
    results = []
    for cut in CUTS:
        engine = make()
        metrics = engine.update(mini_batch().split(cut), OBJECTIVE)
        results.append((metrics, engine.forward([mini_batch()])[0].logprobs))
    (first, logprobs), *others = results
    assert {"actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "actor/lr"} <= first.keys()
    for metrics, other in others:
        assert metrics == pytest.approx(first, rel=10 * loose, abs=loose)
        torch.testing.assert_close(other, logprobs, atol=10 * loose, rtol=10 * loose)


def logprobs_of_update(engine, batch):
    seen = []

    def spy(output, batch, totals):
        seen.append(output.logprobs.detach().cpu())
        return sft(output, batch, totals)

    engine.update([batch], spy)
    return seen[0]


def test_an_update_starts_from_the_log_probs_of_forward(engine, loose):
    (before,) = engine.forward([mini_batch()])
    torch.testing.assert_close(logprobs_of_update(engine, mini_batch()), before.logprobs, atol=loose, rtol=loose)


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_dropout_in_a_models_configuration_is_not_applied(group, tmp_path, family):
    torch.manual_seed(0)
    if family == "gpt2":  # 0.1 of embeddings, attention and residuals, as it comes
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    else:
        model = Qwen2ForCausalLM(tiny_qwen2(attention_dropout=0.1))
    model.save_pretrained(tmp_path)
    engine = FsdpEngine(FsdpSettings(str(tmp_path)))
    (before,) = engine.forward([mini_batch()])
    torch.testing.assert_close(logprobs_of_update(engine, mini_batch()), before.logprobs, atol=1e-5, rtol=1e-5)


def test_supervised_updates_lower_the_loss(engine):
    losses = [engine.update([mini_batch()], sft)["sft/loss"] for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(engine):
    def broken(output, batch, totals):
        loss, metrics = sft(output, batch, totals)
        return loss * float("nan"), metrics

    before = {name: tensor.clone() for name, tensor in engine.weights()}
    assert engine.update([mini_batch()], broken)["actor/skipped_steps"] == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights())
    assert engine.update([mini_batch()], sft)["actor/skipped_steps"] == 0.0
    assert not any(torch.equal(tensor, before[name]) for name, tensor in engine.weights())


def test_a_mini_batch_without_generated_tokens_moves_nothing(engine):
    batch = mini_batch()
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    silent = batch.with_(mask=torch.zeros_like(batch.mask))
    assert engine.update([silent, FlatBatch.empty()], sft)["actor/skipped_steps"] == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights())


def test_weights_have_one_name_each_and_are_whole(engine):
    names = [name for name, _ in engine.weights()]
    assert len(set(names)) == len(names) > 0
    assert all(type(tensor) is torch.Tensor for _, tensor in engine.weights())


def test_gather_on_one_rank_gives_the_rows_back(engine):
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(engine.gather(rows), rows)


def test_a_resumed_engine_goes_on_as_if_it_had_not_stopped(make, tmp_path):
    engine = make()
    for _ in range(3):
        engine.update([mini_batch()], OBJECTIVE)
    save(engine.state(), tmp_path / "checkpoint")
    draw = torch.rand(3)
    expected = [engine.update([mini_batch()], OBJECTIVE) for _ in range(2)]

    resumed = make()
    resumed.load_state(load(resumed.state(), tmp_path / "checkpoint"))
    assert torch.equal(torch.rand(3), draw)
    assert [resumed.update([mini_batch()], OBJECTIVE) for _ in range(2)] == expected


def test_what_the_optimiser_is_told_comes_from_the_settings_not_the_checkpoint(group, tmp_path):
    engine = fsdp(tied=True)(tmp_path / "model")
    engine.update([mini_batch()], sft)
    save(engine.state(), tmp_path / "checkpoint")
    told = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    resumed = fsdp(tied=True, **told)(tmp_path / "model")
    resumed.load_state(load(resumed.state(), tmp_path / "checkpoint"))
    for group_ in resumed.optimizer.param_groups:
        assert {name: group_[name] for name in told} == told
    assert resumed.step == 1
    assert all(float(state["step"]) == 1 for state in resumed.optimizer.state.values())
