"""Optimizers on one rank and on two: the same steps, and checkpoints that either resumes with the same bits."""

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from tiny import tiny_qwen2
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl.algorithms.objective import PolicyObjective
from verl.checkpoint.save import load, save
from verl.data.flat_batch import FlatBatch
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import Schedule

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400), pytest.mark.rotating(5)]

CASES = [(optimizer, model) for optimizer in ("muon", "adamw_8bit") for model in ("dense", "experts")]
LENGTH, SEQUENCES, VOCABULARY = 12, 6, 71


def save_models(root):
    torch.manual_seed(0)
    odd = {"intermediate_size": 151, "vocab_size": VOCABULARY}  # shards of different sizes
    Qwen2ForCausalLM(tiny_qwen2(**odd, num_hidden_layers=1)).save_pretrained(root / "dense")
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(root / "experts")


def micro_batches():
    generator = torch.Generator().manual_seed(1)
    total, offsets = LENGTH * SEQUENCES, torch.arange(SEQUENCES + 1) * LENGTH
    mask = torch.ones(total, dtype=torch.bool)
    mask[offsets[:-1]] = False
    tokens = torch.randint(VOCABULARY, (total,), generator=generator)
    advantages = torch.randn(total, generator=generator)
    batch = FlatBatch(tokens, offsets, mask, None, torch.full((total,), -4.2), None, advantages)
    return batch.split([torch.arange(SEQUENCES)[dist.get_rank() :: dist.get_world_size()].numpy()])


def build(root, optimizer, model, **options):
    # A large eps: AdamW would make whole steps of gradients that are nothing but rounding.
    settings = {"schedule": Schedule(1e-2), "eps": 1e-3, "optimizer": optimizer, **options}
    return FsdpEngine(FsdpSettings(str(root / model), **settings))


def whole(engine):
    """Return the weights and the optimizer state, gathered."""
    state = engine.state()
    tensors = state["model"] | {name: each for name, each in state["optimizer"].items() if name.startswith("state.")}
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in tensors.items()}


def train(root, optimizer, model):
    """Train, save, train on; and resume from the save, plainly and with offloaded state."""
    engine, folder = build(root, optimizer, model), root / f"{optimizer}-{model}-{dist.get_world_size()}"
    for _ in range(3):
        engine.update(micro_batches(), PolicyObjective())
    save(engine.state(), folder)
    results = {"saved": whole(engine)}
    engine.update(micro_batches(), PolicyObjective())
    results["next"] = whole(engine)
    for name, options in (
        ("resumed", {}),
        ("offload", {"optimizer_offload": True}),
        ("policy", {"offload_policy": True}),
    ):
        resumed = build(root, optimizer, model, **options)
        resumed.load_state(load(resumed.state(), folder))
        resumed.update(micro_batches(), PolicyObjective())
        results[name] = whole(resumed)
    return results


def load_from(root, optimizer, model, ranks):
    engine = build(root, optimizer, model)
    engine.load_state(load(engine.state(), root / f"{optimizer}-{model}-{ranks}"))
    return {"loaded": whole(engine)}


def on_two_ranks(rank, port, root):
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port)
    found = {case: train(root, *case) | load_from(root, *case, ranks=1) for case in CASES}
    if rank == 0:
        torch.save(found, root / "two.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return number of ranks -> case -> name -> tensors; `loaded` is what the other number of ranks saved."""
    root = tmp_path_factory.mktemp("optimizers")
    save_models(root)
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        one = {case: train(root, *case) for case in CASES}
        run_ranks(on_two_ranks, 2, free_port(), root, deadline_s=300)
        for case in CASES:
            one[case] |= load_from(root, *case, ranks=2)
    finally:
        dist.destroy_process_group()
    return {1: one, 2: torch.load(root / "two.pt", weights_only=False)}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_number_of_ranks_does_not_change_the_steps(results, case):
    one, two = (results[ranks][case]["next"] for ranks in (1, 2))
    assert one.keys() == two.keys()
    kind = "momentum_buffer" if case[0] == "muon" else "exp_avg_codes"
    assert any(name.endswith(f"o_proj.weight.{kind}") for name in one)
    for name, tensor in one.items():
        if name.endswith("_codes"):  # where a value is between two codes, rounding decides
            assert float((two[name] != tensor).float().mean()) < 0.01, name
        else:
            bound = 1e-5 if case[0] == "muon" else 2e-4
            assert float((two[name] - tensor).abs().max()) < bound, name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["resumed", "offload", "policy"])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_resumed_run_continues_bit_for_bit(results, ranks, name, case):
    assert_equal(results[ranks][case][name], results[ranks][case]["next"])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_other_number_of_ranks_loads_the_bits_that_were_saved(results, ranks, case):
    assert_equal(results[ranks][case]["loaded"], results[3 - ranks][case]["saved"])
