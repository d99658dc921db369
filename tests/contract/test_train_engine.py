"""The contract of every training engine: of those that are registered, in several settings, and of the fake."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_qwen2
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2ForCausalLM, Qwen2ForTokenClassification

import tests.toy_train_engine  # noqa: F401 - registers the engine `toy`
from tests.cuda_stand_in import megatron_on_cpu
from tests.fake_train_engine import FakeSettings, FakeTrainEngine
from verl.algorithms.objective import PolicyObjective, ValueObjective, sft
from verl.algorithms.settings import AlgorithmSettings
from verl.checkpoint.save import get_local_shard, load, save
from verl.config.train_engines import get_train_engine, list_train_engines
from verl.data.flat_batch import FlatBatch
from verl.training.engine import TrainEngine
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.layout import RankLayout
from verl.training.offload import Offloader
from verl.training.process_group import init_process_group
from verl.training.registry import build_engine, get_settings_class
from verl.training.settings import Schedule

pytestmark = pytest.mark.contract

VOCABULARY = 64


@pytest.fixture(scope="module")
def group():
    init_process_group(0, 1, "127.0.0.1", 0)
    yield
    dist.destroy_process_group()


def policy_of(name, tied=False, **settings):
    """Return a factory of a policy with a registered engine."""

    def make(directory):
        torch.manual_seed(0)
        config = tiny_qwen2(vocab_size=VOCABULARY, tie_word_embeddings=tied)
        Qwen2ForCausalLM(config).save_pretrained(directory)
        options = {"schedule": Schedule(1e-2), "grad_clip": None, **settings}
        return build_engine(get_settings_class(name)(str(directory), **options))

    return make


def critic_of(name, **settings):
    """Return a factory of a critic with a nonzero head, so that the first update already changes the backbone."""

    def make(directory):
        torch.manual_seed(0)
        Qwen2ForTokenClassification(tiny_qwen2(vocab_size=VOCABULARY, num_labels=1)).save_pretrained(directory)
        options = {"head": "value", "role": "critic", "schedule": Schedule(1e-2), "grad_clip": None, **settings}
        return build_engine(get_settings_class(name)(str(directory), **options))

    return make


fsdp, critic = partial(policy_of, "fsdp2"), partial(critic_of, "fsdp2")
megatron, megatron_critic = partial(policy_of, "megatron"), partial(critic_of, "megatron")
POLICIES = {
    "fake": lambda directory: FakeTrainEngine(FakeSettings(VOCABULARY)),
    **{name: policy_of(name) for name in list_train_engines()},
    **{f"{name}-tied": policy_of(name, tied=True) for name in list_train_engines()},
    "fsdp-checkpointing": fsdp(tied=True, gradient_checkpointing=True),
    "fsdp-bfloat16": fsdp(tied=False, compute_dtype="bfloat16"),
    "fsdp-offload": fsdp(tied=True, param_offload=True, optimizer_offload=True),
    "fsdp-offload-policy": fsdp(tied=False, offload_policy=True),
    "fsdp-no-reshard": fsdp(tied=False, reshard_after_forward=False),
    "megatron-bfloat16": megatron(tied=True, compute_dtype="bfloat16"),
    "megatron-checkpointing": megatron(gradient_checkpointing=True, fp32_lm_head=True),
    "megatron-offload": megatron(tied=True, param_offload=True, optimizer_offload=True, grad_offload=True),
    "megatron-offload-bfloat16": megatron(compute_dtype="bfloat16", param_offload=True, optimizer_offload=True),
}
CRITICS = {
    "fake-critic": lambda directory: FakeTrainEngine(FakeSettings(VOCABULARY, head="value", role="critic")),
    **{f"{name}-critic": critic_of(name) for name in list_train_engines(supporting="value_head")},
    "fsdp-critic-checkpointing": critic(gradient_checkpointing=True),
    "fsdp-critic-offload": critic(param_offload=True, optimizer_offload=True, reshard_after_forward=False),
    "fsdp-critic-bfloat16": critic(compute_dtype="bfloat16"),
    "fsdp-critic-all-bfloat16": critic(param_dtype="bfloat16", compute_dtype="bfloat16"),
    "megatron-critic-bfloat16": megatron_critic(compute_dtype="bfloat16", gradient_checkpointing=True),
}
ENGINES = POLICIES | CRITICS


@pytest.fixture
def stand_in(request):
    """Let Megatron-Core run on the CPU in tests of its engine."""
    name = next((name for name in request.node.callspec.params.values() if "megatron" in str(name)), None)
    if name is None:
        yield
        return
    pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
    with megatron_on_cpu():
        yield


@pytest.fixture(params=ENGINES)
def make(request, group, stand_in, tmp_path):
    return lambda: ENGINES[request.param](tmp_path / "model")


@pytest.fixture
def engine(make):
    return make()


@pytest.fixture(params=POLICIES)
def policy(request, group, stand_in, tmp_path):
    return POLICIES[request.param](tmp_path / "model")


@pytest.fixture(params=CRITICS)
def valuer(request, group, stand_in, tmp_path):
    return CRITICS[request.param](tmp_path / "model")


@pytest.fixture
def loose(request):
    """Return the tolerance for the same batch split differently: about three digits in bfloat16."""
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
        values=torch.randn(total),
        returns=1 + torch.randn(total),
    )


OBJECTIVE = PolicyObjective(AlgorithmSettings(agg_mode="seq-mean-token-mean", entropy_coeff=0.1, loss_kl_coef=0.2))
VALUE_OBJECTIVE = ValueObjective(AlgorithmSettings(value_clip=10.0, value_agg_mode="seq-mean-token-mean"))
CUTS = [[[0, 1, 2, 3, 4, 5]], [[4], [2, 0], [], [5, 3, 1]], [[3], [5, 4, 2, 1, 0]]]


def objective(engine):
    return VALUE_OBJECTIVE if engine.settings.head == "value" else OBJECTIVE


def metric(engine, name):
    return f"{engine.settings.role}/{name}"


def get_capabilities(engine):
    """Return what an engine declares; the fake is not registered."""
    if isinstance(engine, FakeTrainEngine):
        return {"exact_kl", "squared_probs"}
    return get_train_engine(engine.settings.engine).capabilities


def known(output):
    return [numbers for numbers in output if numbers is not None]


def test_outputs_are_zero_outside_the_mask(engine):
    batch = mini_batch()
    (output,) = engine.forward([batch])
    for numbers in known(output):
        assert numbers.shape == batch.tokens.shape
        assert numbers.dtype == torch.float32
        assert not numbers.requires_grad
        assert not numbers[~batch.mask].any()


def test_log_probs_and_entropies_are_those_of_a_distribution(policy):
    batch = mini_batch()
    (output,) = policy.forward([batch])
    assert (output.logprobs[batch.mask] < 0).all()
    assert (output.entropy[batch.mask] > 0).all()
    assert (output.entropy <= math.log(VOCABULARY) + 1e-4).all()


def test_forward_does_not_depend_on_the_cut(engine, loose):
    batch = mini_batch()
    (whole,) = engine.forward([batch])
    for cut in CUTS:
        for indices, output in zip(cut, engine.forward(batch.split(cut)), strict=True):
            for part, numbers in zip(known(output), known(whole), strict=True):
                expected = batch.with_(values=numbers).select(indices).values
                torch.testing.assert_close(part, expected, atol=loose, rtol=loose)


def test_temperature_flattens_the_distribution(policy):
    batch = mini_batch()
    (one,), (hot,) = policy.forward([batch]), policy.forward([batch], temperature=5.0)
    assert (hot.entropy[batch.mask] > one.entropy[batch.mask]).all()


def test_the_kl_to_a_reference_is_zero_to_itself_and_falls_when_it_is_the_loss(policy, request, tmp_path, loose):
    if "exact_kl" not in get_capabilities(policy):
        pytest.skip("the engine does not declare exact_kl")
    other = POLICIES[request.node.callspec.params["policy"]](tmp_path / "other")
    batch = mini_batch().with_(advantages=torch.zeros(42))
    exact = PolicyObjective(AlgorithmSettings(loss_kl_coef=1.0, loss_kl_type="full"))
    (itself,) = policy.forward([batch], reference=other)
    assert float(itself.kl.abs().max()) < loose
    for _ in range(5):
        other.update([batch], sft)
    (before,) = policy.forward([batch], reference=other)
    assert (before.kl[batch.mask] > 0).all()
    assert not before.kl[~batch.mask].any()
    for part, indices in zip(policy.forward(batch.split(CUTS[1]), reference=other), CUTS[1], strict=True):
        expected = batch.with_(values=before.kl).select(indices).values
        torch.testing.assert_close(part.kl, expected, atol=loose, rtol=loose)
    losses = [policy.update(batch.split(CUTS[1]), exact, reference=other)["actor/kl_loss"] for _ in range(8)]
    assert losses[0] == pytest.approx(float(before.kl.sum() / batch.mask.sum()), rel=max(loose, 1e-3))
    assert losses[-1] < losses[0] / 2


def test_metrics_and_new_weights_do_not_depend_on_the_cut(make, loose):
    results = []
    for cut in CUTS:
        engine = make()
        metrics = engine.update(mini_batch().split(cut), objective(engine))
        results.append((metrics, engine.forward([mini_batch()])[0][0]))
    (first, numbers), *others = results
    terms = ["vf_loss"] if engine.settings.head == "value" else ["pg_loss", "kl_loss", "entropy"]
    assert {metric(engine, name) for name in (*terms, "grad_norm", "lr", "skipped_steps")} <= first.keys()
    assert {name.split("/")[0] for name in first} == {engine.settings.role}
    for metrics, other in others:
        assert metrics == pytest.approx(first, rel=10 * loose, abs=loose)
        torch.testing.assert_close(other, numbers, atol=10 * loose, rtol=10 * loose)


def seen_by_update(engine, batch):
    """Return the log-probs or values that the loss receives."""
    seen = []

    def spy(output, batch, totals):
        seen.append(output[0].detach().cpu())
        return objective(engine)(output, batch, totals)

    engine.update([batch], spy)
    return seen[0]


def test_an_update_starts_from_the_output_of_forward(engine, loose):
    (before,) = engine.forward([mini_batch()])
    torch.testing.assert_close(seen_by_update(engine, mini_batch()), before[0], atol=loose, rtol=loose)


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_dropout_in_a_models_configuration_is_not_applied(group, tmp_path, family):
    torch.manual_seed(0)
    if family == "gpt2":  # its default dropout is 0.1
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    else:
        model = Qwen2ForCausalLM(tiny_qwen2(attention_dropout=0.1))
    model.save_pretrained(tmp_path)
    engine = FsdpEngine(FsdpSettings(str(tmp_path)))
    (before,) = engine.forward([mini_batch()])
    torch.testing.assert_close(seen_by_update(engine, mini_batch()), before.logprobs, atol=1e-5, rtol=1e-5)


def test_supervised_updates_lower_the_loss(policy):
    losses = [policy.update([mini_batch()], sft)["train/loss"] for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]


def test_values_come_nearer_to_the_returns(valuer):
    losses = [valuer.update([mini_batch()], VALUE_OBJECTIVE)["critic/vf_loss"] for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]


def test_a_new_critic_predicts_zero_and_then_learns(group, tmp_path):
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True)).save_pretrained(tmp_path)
    engine = FsdpEngine(FsdpSettings(str(tmp_path), head="value", role="critic", schedule=Schedule(1e-2)))
    assert not engine.forward([mini_batch()])[0].values.any()
    losses = [engine.update([mini_batch()], VALUE_OBJECTIVE)["critic/vf_loss"] for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]
    assert engine.forward([mini_batch()])[0].values.any()


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(engine):
    def broken(output, batch, totals):
        loss, metrics = objective(engine)(output, batch, totals)
        return loss * float("nan"), metrics

    before = {name: tensor.clone() for name, tensor in engine.weights()}
    assert engine.update([mini_batch()], broken)[metric(engine, "skipped_steps")] == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights())
    assert engine.update([mini_batch()], objective(engine))[metric(engine, "skipped_steps")] == 0.0
    assert not any(torch.equal(tensor, before[name]) for name, tensor in engine.weights())


def test_a_weight_that_is_not_finite_is_named_as_divergence(make):
    checked, other = make(), make()
    assert checked.find_divergence() == ""
    assert checked.update([mini_batch()], objective(checked)) == other.update([mini_batch()], objective(other))
    state = checked.state()
    for value in state["model"].values():
        get_local_shard(value).tensor.fill_(math.nan)
    checked.load_state(state)
    assert checked.find_divergence().startswith("weights are not finite: ")


def test_a_save_after_the_check_loads_nothing_to_the_device(group, tmp_path, monkeypatch):
    engine = POLICIES["fsdp-offload"](tmp_path)  # has not stepped yet, as an actor while its critic warms up
    engine.find_divergence()
    monkeypatch.setattr(Offloader, "load", lambda offloader: pytest.fail("tensors are loaded"))
    assert any(name.endswith("exp_avg") for name in engine.state()["optimizer"])


def test_a_model_whose_gradient_overflows_has_diverged(group, tmp_path):
    engine = fsdp(tied=False)(tmp_path / "model")
    state = engine.state()
    state["model"] = {name: value.clone().fill_(1e30) for name, value in state["model"].items()}
    engine.load_state(state)
    assert "the norm of a gradient is" in engine.find_divergence()


def test_a_mini_batch_without_generated_tokens_is_skipped(engine):
    batch = mini_batch()
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    silent = batch.with_(mask=torch.zeros_like(batch.mask))
    assert engine.update([silent, FlatBatch.empty()], objective(engine))[metric(engine, "skipped_steps")] == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights())


def test_weights_have_one_name_each_and_are_whole(engine):
    names = [name for name, _ in engine.weights()]
    assert len(set(names)) == len(names) > 0
    assert all(type(tensor) is torch.Tensor for _, tensor in engine.weights())


def test_weight_shapes_are_those_of_the_weights(engine):
    shapes = [(name, weight.shape, weight.dtype, weight.device.type) for name, weight in engine.weight_shapes()]
    assert shapes == [(name, weight.shape, weight.dtype, "meta") for name, weight in engine.weights()]


def test_local_shards_hold_the_weights(engine):
    if (shards := engine.local_shards(torch.float32)) is None:
        return  # one rank sends what all gather
    expected = {name: weight.clone() for name, weight in engine.weights(torch.float32)}
    for name, shard in shards:
        whole = torch.full(shard.shape, math.nan)
        shard.copy_to(whole)
        assert torch.equal(whole, expected.pop(name))
    assert not expected


def test_weights_move_toward_those_of_another_engine(make):
    one, other = make(), make()
    start = {name: weight.clone() for name, weight in one.weights()}
    other.update([mini_batch()], objective(other))
    target = {name: weight.clone() for name, weight in other.weights()}
    one.copy_weights_from(other, ratio=0.5)
    for name, weight in one.weights():
        expected = torch.lerp(start[name].float(), target[name].float(), 0.5)
        torch.testing.assert_close(weight.float(), expected, atol=1e-3, rtol=1e-2)
    one.copy_weights_from(other)
    assert all(torch.equal(weight, target[name]) for name, weight in one.weights())


def test_a_float32_average_moves_toward_bfloat16_weights(tmp_path, group):
    options = {"schedule": Schedule(1e-2), "grad_clip": None}
    actor = fsdp(param_dtype="bfloat16", compute_dtype="bfloat16")(tmp_path)
    average = build_engine(FsdpSettings(str(tmp_path), **options).freeze(param_offload=False))
    start = {name: weight.clone() for name, weight in average.weights()}
    actor.update([mini_batch()], objective(actor))
    average.copy_weights_from(actor, ratio=0.01)
    target = dict(actor.weights())
    for name, weight in average.weights():
        torch.testing.assert_close(weight, torch.lerp(start[name], target[name].float(), 0.01))
    assert any(not torch.equal(weight, start[name]) for name, weight in average.weights())


def test_an_engine_has_the_attributes_that_callers_use(engine):
    assert isinstance(engine, TrainEngine)
    assert (engine.rank, engine.data_rank, engine.layout) == (0, 0, RankLayout((0,)))
    assert list(engine.notes) == []


def test_the_schedule_decides_the_learning_rate_of_an_update(engine):
    engine.schedule = Schedule(1e-3, "linear", total_steps=4)
    rates = []
    for _ in range(3):
        rates.append(engine.update([mini_batch()], objective(engine))[metric(engine, "lr")])
        engine.advance_schedule()
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4])


def test_gather_on_one_rank_gives_the_rows_back(engine):
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(engine.gather(rows), rows)


def test_a_resumed_engine_continues_as_if_it_had_not_stopped(make, tmp_path):
    engine = make()
    for _ in range(3):
        engine.update([mini_batch()], objective(engine))
    save(engine.state(), tmp_path / "checkpoint")
    draw = torch.rand(3)
    expected = [engine.update([mini_batch()], objective(engine)) for _ in range(2)]

    resumed = make()
    resumed.load_state(load(resumed.state(), tmp_path / "checkpoint"))
    assert torch.equal(torch.rand(3), draw)
    assert [resumed.update([mini_batch()], objective(engine)) for _ in range(2)] == expected


def test_saving_before_the_first_update_does_not_change_it(make):
    plain, saved = make(), make()
    saved.state()
    for engine in (plain, saved):
        engine.update([mini_batch()], objective(engine))
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(plain.weights(), saved.weights(), strict=True))


def test_optimizer_options_come_from_the_settings_not_the_checkpoint(group, tmp_path):
    engine = fsdp(tied=True)(tmp_path / "model")
    engine.update([mini_batch()], sft)
    engine.advance_schedule()
    save(engine.state(), tmp_path / "checkpoint")
    options = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    resumed = fsdp(tied=True, **options)(tmp_path / "model")
    resumed.load_state(load(resumed.state(), tmp_path / "checkpoint"))
    for group_ in resumed.optimizer.param_groups:
        assert {name: group_[name] for name in options} == options
    assert resumed.step == 1
    assert all(float(state["step"]) == 1 for state in resumed.optimizer.state.values())
