"""An adapter on sharded weights learns what a plain PEFT model learns, on one rank and on two."""

import json

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from ranks import free_port, run_ranks
from tiny import tiny_qwen2
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from verl.algorithms.objective import PolicyObjective
from verl.algorithms.settings import AlgorithmSettings
from verl.checkpoint.save import load, save
from verl.data.flat_batch import FlatBatch
from verl.errors import CheckpointError, EngineError
from verl.training.fsdp.engine import BaseModelReference, FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import LoraSettings, Schedule

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

PARTS = {1: [[[0, 1, 2, 3, 4, 5]]], 2: [[[5, 2], [0]], [[3, 4, 1], []]]}
LORA = LoraSettings(4, alpha=8, seed=3)
EXACT = PolicyObjective(AlgorithmSettings(loss_kl_coef=0.2, loss_kl_type="full"))


def mini_batch():
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 9, 3, 12, 4, 7]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.rand(sum(lengths), generator=generator) < 0.6
    mask[offsets[:-1]] = False
    noise = [torch.randn(sum(lengths), generator=generator) for _ in range(3)]
    tokens = torch.randint(64, (sum(lengths),), generator=generator)
    return FlatBatch(tokens, offsets, mask, None, -4 + 0.3 * noise[0], -4 + 0.3 * noise[1], noise[2])


def log_likelihood(output, batch, totals):
    loss = -output.logprobs[batch.mask].sum() / totals.tokens
    return loss, {"loss": loss.detach()}


def engine(path, **changes):
    return FsdpEngine(
        FsdpSettings(str(path), lora=LORA, schedule=Schedule(1e-2), grad_clip=0.5, weight_decay=0.0, **changes)
    )


def clones(weights):
    return {name: tensor.clone() for name, tensor in weights}


def scenario(root):
    """Train with the exact KL to the base model, save, continue; and the same after a resume."""
    results, path = {}, root / "model"
    made = engine(path, gradient_checkpointing=True)
    world, rank = made.world_size, made.rank
    local = mini_batch().split(PARTS[world][rank])
    off, plain = BaseModelReference(made), FsdpEngine(FsdpSettings(str(path), trainable=False))
    results["first"], before = clones(made.adapter_weights()), clones(made.base_weights())
    results["at_first_equal"] = torch.equal(made.forward(local)[0].logprobs, plain.forward(local)[0].logprobs)
    results["metrics"] = [made.update(local, EXACT, reference=off) for _ in range(3)]
    moved = made.forward(local)[0].logprobs
    results["reference_equal"] = all(
        torch.equal(one.logprobs, other.logprobs) and torch.equal(one.entropy, other.entropy)
        for one, other in zip(off.forward(local), plain.forward(local), strict=True)
    )
    results["kl_equal"] = torch.equal(
        made.forward(local, reference=off)[0].kl, made.forward(local, reference=plain)[0].kl
    )
    results["moved"] = float((moved - plain.forward(local)[0].logprobs).abs().max())
    copy = engine(path, trainable=False)
    copy.copy_weights_from(made)
    results["copy_equal"] = torch.equal(copy.forward(local)[0].logprobs, moved)
    after = clones(made.base_weights())
    results["base_unchanged"] = before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    state = made.state()
    results["saved_names"], results["base"] = list(state["model"]), state["base"]
    save(state, root / f"saved-by-{world}")
    results["metrics"] += [made.update(local, EXACT, reference=off) for _ in range(2)]
    results["weights"], results["adapter"] = clones(made.weights()), clones(made.adapter_weights())
    again = engine(path)
    again.load_state(load(again.state(), root / f"saved-by-{world}"))
    off = BaseModelReference(again)
    results["resumed"] = [again.update(local, EXACT, reference=off) for _ in range(2)]
    results["resumed_adapter"] = clones(again.adapter_weights())
    return results


def critic(root):
    made = engine(root / "model", head="value", role="critic")
    local = mini_batch().split(PARTS[made.world_size][made.rank])

    def squared(output, batch, totals):
        loss = (output.values - 1)[batch.mask].square().sum() / totals.tokens
        return loss, {"loss": loss.detach()}

    losses = [made.update(local, squared)["loss"] for _ in range(6)]
    return {"losses": losses, "saved": list(made.state()["model"])}


def two_ranks(rank, port, root):
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port)
    results = scenario(root) | {"critic": critic(root)}
    again = engine(root / "model")
    again.load_state(load(again.state(), root / "saved-by-1"))
    local = mini_batch().split(PARTS[2][rank])
    results["of_one"] = [again.update(local, EXACT, reference=BaseModelReference(again)) for _ in range(2)]
    torch.save(results, root / f"found-{rank}.pt")
    dist.destroy_process_group()


def plain_peft(path, adapter):
    """Return a plain PEFT model with the tensors of `adapter`."""
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = get_peft_model(hf, LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(adapter[name.replace(".default", "")])
    return model


def plain_gradients(model):
    """Return the gradients of the same loss, sequence by sequence."""
    batch, total = mini_batch(), 0.0
    for index in range(len(batch.lengths)):
        one = batch.select(torch.tensor([index]))
        logprobs = model(one.tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, one.tokens[1:, None])[:, 0]
        total = total - logprobs[one.mask[1:]].sum()
    (total / batch.mask.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True)).save_pretrained(root / "model")
    torch.manual_seed(1)
    Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True)).save_pretrained(root / "other")
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        one = scenario(root) | {"critic": critic(root)}
        made = engine(root / "model")
        with torch.no_grad():  # a second factor of zero would hide the gradient of the first
            for name, parameter in made.model.named_parameters():
                if ".lora_B." in name:
                    parameter.fill_(0.01)
        one["start"] = clones(made.adapter_weights())
        made._backward(mini_batch(), log_likelihood, made.count_totals([mini_batch()]), None, None)
        one["gradients"] = {
            f"base_model.model.{name}": parameter.grad.full_tensor()
            for name, parameter in made.model.hf.named_parameters()
            if parameter.grad is not None
        }
        run_ranks(two_ranks, 2, free_port(), root, deadline_s=300)
        other_weights = engine(root / "other")
        state = load(other_weights.state(), root / "saved-by-1")
        with pytest.raises(CheckpointError) as refused:
            other_weights.load_state(state)
        one["refused"] = str(refused.value)
    finally:
        dist.destroy_process_group()
    return root, one, [torch.load(root / f"found-{rank}.pt", weights_only=False) for rank in range(2)]


def test_the_model_starts_as_the_base_and_moves_while_the_base_stays(both):
    for results in (both[1], *both[2]):
        assert results["at_first_equal"]
        assert results["moved"] > 1e-3
        assert results["base_unchanged"]


def test_with_its_adapter_disabled_it_is_the_base_to_the_bit(both):
    assert all(results["reference_equal"] and results["kl_equal"] for results in (both[1], *both[2]))


def test_a_reference_that_moves_takes_the_adapter(both):
    assert all(results["copy_equal"] for results in (both[1], *both[2]))


def test_initial_adapters_are_equal_on_all_ranks(both):
    _, one, two = both
    for results in two:
        assert all(torch.equal(tensor, results["first"][name]) for name, tensor in one["first"].items())


def test_two_ranks_train_like_one(both):
    _, one, two = both
    assert two[0]["metrics"] == two[1]["metrics"]
    for metrics, expected in zip(two[0]["metrics"], one["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(two[0]["weights"][name], tensor, atol=2e-3, rtol=1e-2)


def test_a_checkpoint_holds_only_the_adapter_and_resumes_bit_for_bit(both):
    for results in (both[1], *both[2]):
        assert all(".lora_" in name for name in results["saved_names"])
        assert results["resumed"] == results["metrics"][3:]
        assert all(
            torch.equal(results["resumed_adapter"][name], results["adapter"][name]) for name in results["adapter"]
        )


def test_a_checkpoint_of_one_rank_resumes_on_two(both):
    for metrics, expected in zip(both[2][0]["of_one"], both[1]["metrics"][3:], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_an_adapter_on_another_base_is_refused(both):
    assert "belongs to other weights" in both[1]["refused"]


def test_gradients_are_those_of_a_plain_peft_model(both):
    root, one, _ = both
    expected = plain_gradients(plain_peft(root / "model", one["start"]))
    assert expected.keys() == one["gradients"].keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(one["gradients"][name], gradient, atol=1e-6, rtol=1e-4)


def test_full_weights_are_those_of_pefts_merge(both):
    root, one, _ = both
    right = dict(plain_peft(root / "model", one["adapter"]).merge_and_unload().named_parameters())
    assert right.keys() == one["weights"].keys()
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(tensor, right[name], atol=1e-6, rtol=1e-5)
    config = json.loads(one["base"]["adapter"])
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


def test_a_critic_trains_its_whole_head_along_with_the_adapter(both):
    for results in (both[1], *both[2]):
        assert results["critic"]["losses"][-1] < results["critic"]["losses"][0]
        assert {name for name in results["critic"]["saved"] if ".lora_" not in name} == {"score.weight", "score.bias"}
    assert both[2][0]["critic"]["losses"] == pytest.approx(both[1]["critic"]["losses"], rel=1e-3)


def test_unknown_modules_are_named_with_the_available_ones(both):
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        with pytest.raises(
            EngineError, match=r"target_modules: qkv matches no linear module .* which are q_proj, k_proj"
        ):
            FsdpEngine(FsdpSettings(str(both[0] / "model"), lora=LoraSettings(4, targets=("q_proj", "qkv"))))
    finally:
        dist.destroy_process_group()
