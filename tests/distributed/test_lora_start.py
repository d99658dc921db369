"""A run that starts from an adapter computes what PEFT loads, on one rank and on two, and resumes bit for bit."""

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from ranks import free_port, run_ranks
from tiny import save_peft_adapter, tiny_qwen2
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from verl.algorithms.objective import PolicyObjective
from verl.algorithms.settings import AlgorithmSettings
from verl.checkpoint.save import load, save
from verl.data.flat_batch import FlatBatch
from verl.training.fsdp.engine import BaseModelReference, FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import LoraSettings, Schedule

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300), pytest.mark.rotating(3)]

LENGTHS = [5, 9, 3, 12]
PARTS = {1: [[[0, 1, 2, 3]]], 2: [[[2, 0]], [[3, 1]]]}
EXACT = PolicyObjective(AlgorithmSettings(loss_kl_coef=0.2, loss_kl_type="full"))


def mini_batch():
    generator = torch.Generator().manual_seed(1)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    mask = torch.ones(sum(LENGTHS), dtype=torch.bool)
    mask[offsets[:-1]] = False
    noise = [torch.randn(sum(LENGTHS), generator=generator) for _ in range(3)]
    tokens = torch.randint(64, (sum(LENGTHS),), generator=generator)
    return FlatBatch(tokens, offsets, mask, None, -4 + 0.3 * noise[0], -4 + 0.3 * noise[1], noise[2])


def make_engine(root, **changes):
    lora = LoraSettings(4, alpha=8, targets=("q_proj", "v_proj", "up_proj"), path=str(root / "adapter"))
    settings = FsdpSettings(str(root / "model"), lora=lora, schedule=Schedule(1e-2), weight_decay=0.0, **changes)
    return FsdpEngine(settings)


def clones(weights):
    return {name: tensor.clone() for name, tensor in weights}


def scenario(root):
    """The first weights and log-probs; then train, save, and continue, also after a resume."""
    engine = make_engine(root)
    world, rank = engine.world_size, engine.rank
    [parts] = [PARTS[world][rank]]
    local = mini_batch().split(parts)
    results = {"first": clones(engine.adapter_weights()), "merged": clones(engine.weights())}
    results["logprobs"] = dict(zip(parts[0], split(engine.forward(local)[0], local[0]), strict=True))
    base = BaseModelReference(engine)
    results["base"] = dict(zip(parts[0], split(base.forward(local)[0], local[0]), strict=True))
    results["metrics"] = [engine.update(local, EXACT, reference=base) for _ in range(2)]
    save(engine.state(), root / f"saved-by-{world}")
    results["metrics"] += [engine.update(local, EXACT, reference=base) for _ in range(2)]
    again = make_engine(root)
    again.load_state(load(again.state(), root / f"saved-by-{world}"))
    base = BaseModelReference(again)
    results["resumed"] = [again.update(local, EXACT, reference=base) for _ in range(2)]
    results["same_end"] = all(
        torch.equal(one, other)
        for (_, one), (_, other) in zip(engine.adapter_weights(), again.adapter_weights(), strict=True)
    )
    return results


def split(output, batch):
    return [part[1:] for part in output.logprobs.split(batch.lengths.tolist())]


def two_ranks(rank, port, root):
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port)
    torch.save(scenario(root), root / f"found-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    root = tmp_path_factory.mktemp("start")
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2()).save_pretrained(root / "model")
    save_peft_adapter(root / "model", root / "adapter", target_modules=["q_proj", "v_proj", "up_proj"])
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        one = scenario(root)
    finally:
        dist.destroy_process_group()
    run_ranks(two_ranks, 2, free_port(), root, deadline_s=200)
    return root, one, [torch.load(root / f"found-{rank}.pt", weights_only=False) for rank in range(2)]


@torch.no_grad()
def plain_logprobs(model):
    batch = mini_batch()
    rows = batch.tokens.split(LENGTHS)
    logits = [model(row[None]).logits[0, :-1].log_softmax(-1) for row in rows]
    return [each.gather(-1, row[1:, None])[:, 0] for each, row in zip(logits, rows, strict=True)]


def test_the_first_log_probs_are_those_of_peft_and_without_the_adapter_those_of_the_base(both):
    root, one, two = both
    base = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32).eval()
    plain = plain_logprobs(base)
    adapted = plain_logprobs(PeftModel.from_pretrained(base, root / "adapter").eval())
    for results in (one, *two):
        for index, logprobs in results["logprobs"].items():
            torch.testing.assert_close(logprobs, adapted[index], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(results["base"][index], plain[index], atol=1e-5, rtol=1e-5)
            assert not torch.allclose(plain[index], adapted[index], atol=1e-3)
    assert sorted(index for results in two for index in results["logprobs"]) == [0, 1, 2, 3]


def test_the_first_weights_are_those_of_the_file_and_of_pefts_merge(both):
    root, one, two = both
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32), root / "adapter"
    )
    factors = {name.replace(".default", ""): each for name, each in model.named_parameters() if ".lora_" in name}
    merged = dict(model.merge_and_unload().named_parameters())
    for results in (one, *two):
        assert results["first"].keys() == factors.keys()
        assert all(torch.equal(tensor, factors[name]) for name, tensor in results["first"].items())
        assert results["merged"].keys() == merged.keys()
        for name, tensor in results["merged"].items():
            torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-5)


def test_two_ranks_train_like_one_and_a_resumed_run_continues_bit_for_bit(both):
    _, one, two = both
    for results in (one, *two):
        assert results["resumed"] == results["metrics"][2:]
        assert results["same_end"]
    assert two[0]["metrics"] == two[1]["metrics"]
    for metrics, expected in zip(two[0]["metrics"], one["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)
