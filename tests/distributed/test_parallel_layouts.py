"""Four real ranks train like one in every layout, and a checkpoint of one layout resumes in another."""

from itertools import islice

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from tiny import save_family, tiny_qwen2
from transformers import Qwen2ForCausalLM

from verl.algorithms.objective import PolicyObjective
from verl.algorithms.settings import AlgorithmSettings
from verl.checkpoint.save import load, save
from verl.data.flat_batch import FlatBatch
from verl.errors import EngineError
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import LoraSettings, Schedule
from verl.weights.bucket import unpack
from verl.workers.weight_packer import WeightPacker

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

OBJECTIVE = PolicyObjective(AlgorithmSettings(agg_mode="seq-mean-token-mean", entropy_coeff=0.1, loss_kl_coef=0.2))
LAYOUTS = {
    "fsdp": {},
    "hsdp": {"fsdp_size": 2},
    "ulysses": {"sequence_parallel_size": 4},
    "hsdp and ulysses": {"fsdp_size": 2, "sequence_parallel_size": 2},
}
EXPERTS = {
    "fsdp": {},
    "experts": {"expert_parallel_size": 4},
    "experts, hsdp and ulysses": {"expert_parallel_size": 2, "fsdp_size": 2, "sequence_parallel_size": 2},
}
TWO = {name: LAYOUTS[name] for name in ("fsdp", "hsdp and ulysses")}
CASES = {
    "adamw": ("model", LAYOUTS, {}),
    "muon": ("model", TWO, {"optimizer": "muon"}),
    "lora": ("model", TWO, {"lora": LoraSettings(4)}),
    "sampling mask": ("model", TWO, {}),
    "mixture": ("mixture", EXPERTS, {"router_replay": True}),
    "mixture, muon": ("mixture", EXPERTS, {"optimizer": "muon"}),
}
PARTS = {
    1: [[[0, 1, 2, 3, 4, 5, 6]]],
    2: [[[6, 2], [0], [5, 1]], [[3, 4], [], []]],
    4: [[[6, 2], []], [[0], [5]], [[], []], [[1], [3, 4]]],
}
SPARE = 1e-5
"""How far numbers of order one may be apart: float32 sums in another order, and AdamW's eps is large."""


def pairs(layouts):
    """Return each layout with the next one, and the last with the first."""
    names = list(layouts)
    return zip(names, [*names[1:], names[0]], strict=True)


def mini_batch(case):
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 9, 9, 3, 12, 4, 7]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.6
    mask[offsets[:-1]] = False
    mask[offsets[3] : offsets[4]] = False
    noise = [torch.randn(total, generator=generator) for _ in range(3)]
    tokens = torch.randint(64, (total,), generator=generator)
    batch = FlatBatch(tokens, offsets, mask, None, -4 + 0.3 * noise[0], -4 + 0.3 * noise[1], noise[2])
    if case != "sampling mask":
        return batch
    others = torch.randint(64, (total, 5), generator=generator)
    return batch.with_(kept_ids=torch.cat([tokens[:, None], others], 1).int())


def engine(root, case, layout):
    model, layouts, options = CASES[case]
    options = {"schedule": Schedule(1e-2), "eps": 1e-3, "weight_decay": 0.0, **options, **layouts[layout]}
    return FsdpEngine(FsdpSettings(str(root / model), **options))


def train(engine, case, updates):
    group = engine.settings.sequence_parallel_size
    local = mini_batch(case).split(PARTS[engine.world_size // group][engine.rank // group])
    output = engine.forward([mini_batch(case)])[0]
    metrics = [engine.update(local, OBJECTIVE) for _ in range(updates)]
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    return {"output": output, "metrics": metrics, "weights": weights, "packed": pack(engine)}


def pack(engine):
    """Return the weights in bfloat16 as rank 0 packs them, after a sync that ended early; and if ranks wrote parts."""
    dtype = torch.bfloat16
    packer = WeightPacker(
        lambda: engine.weights(dtype),
        shards=lambda: engine.local_shards(dtype),
        max_bytes=4_000,
        is_one_machine=True,
    )
    packed = {}
    for most in (1, 1000):
        if engine.rank:
            packer.take_part()
            continue
        packer.start()
        for bucket in islice(iter(packer.pack_next, None), most):
            packed |= unpack(bucket.slots, torch.from_numpy(bucket.data.copy()))
        packer.finish()
    return packed, engine.local_shards(dtype) is not None


def scenario(root, case, layout, *, resumed=""):
    """Run two updates and save; or, from the checkpoint of another layout, two more."""
    trained = engine(root, case, layout)
    if resumed:
        trained.load_state(load(trained.state(), root / f"{case}-{resumed}"))
    result = train(trained, case, 2)
    if not resumed:
        save(trained.state(), root / f"{case}-{layout}")
    return result


def four_ranks(rank, port, root):
    torch.set_num_threads(1)
    init_process_group(rank, 4, "127.0.0.1", port)
    results = {}
    for case, (_, layouts, _) in CASES.items():
        results[case] = {layout: scenario(root, case, layout) for layout in layouts}
        for before, after in pairs(layouts):
            results[case][f"{before} -> {after}"] = scenario(root, case, after, resumed=before)
    torch.save(results, root / f"results-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Run four updates on one rank here, and every layout on four ranks in separate processes."""
    root = tmp_path_factory.mktemp("layouts")
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True, **sizes)).save_pretrained(root / "model")
    save_family("Qwen3-MoE", root / "mixture", **sizes)
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        with pytest.raises(EngineError, match="does not divide the 1 train ranks"):
            engine(root, "adamw", "hsdp")
        one = {}
        for case in CASES:
            trained = engine(root, case, "fsdp")
            one[case] = [train(trained, case, 2) for _ in range(2)]
    finally:
        dist.destroy_process_group()
    run_ranks(four_ranks, 4, free_port(), root, deadline_s=800)
    return one, [torch.load(root / f"results-{rank}.pt", weights_only=False) for rank in range(4)]


NAMES = [
    (case, name, name not in layouts)
    for case, (_, layouts, _) in CASES.items()
    for name in (*layouts, *(f"{before} -> {after}" for before, after in pairs(layouts)))
]


@pytest.mark.parametrize(("case", "name", "resumed"), NAMES)
def test_ranks_pack_the_weights_to_the_bit_by_parts_where_they_have_rows(both, case, name, resumed):
    packed, is_in_parts = both[1][0][case][name]["packed"]
    weights = both[1][0][case][name]["weights"]
    assert is_in_parts == (case in ("adamw", "muon", "sampling mask"))
    assert packed.keys() == weights.keys()
    assert all(torch.equal(packed[key], weights[key].bfloat16()) for key in weights)


@pytest.mark.parametrize(("case", "name", "resumed"), NAMES)
def test_metrics_and_weights_are_those_of_one_rank(both, case, name, resumed):
    one, four = both
    expected, result = one[case][resumed], four[0][case][name]
    for metrics, those in zip(result["metrics"], expected["metrics"], strict=True):
        assert metrics == pytest.approx(those, rel=SPARE, abs=SPARE)
        assert metrics["actor/grad_norm"] > 1e-3
    assert result["weights"].keys() == expected["weights"].keys()
    for weight, tensor in expected["weights"].items():
        torch.testing.assert_close(result["weights"][weight], tensor, atol=SPARE, rtol=SPARE, msg=weight)


@pytest.mark.parametrize(("case", "name", "resumed"), NAMES)
def test_log_probs_and_chosen_experts_are_those_of_one_rank(both, case, name, resumed):
    one, four = both
    expected = one[case][resumed]["output"]
    for rank in four:
        output = rank[case][name]["output"]
        torch.testing.assert_close(output.logprobs, expected.logprobs, atol=SPARE, rtol=SPARE)
        assert (output.routed_experts is None) == (case != "mixture")
        if output.routed_experts is not None:
            assert torch.equal(output.routed_experts, expected.routed_experts)


@pytest.mark.parametrize(("case", "name"), [(case, name) for case, name, _ in NAMES])
def test_all_ranks_report_the_same(both, case, name):
    _, four = both
    for other in four[1:]:
        assert other[case][name]["metrics"] == four[0][case][name]["metrics"]
        for weight, tensor in four[0][case][name]["weights"].items():
            assert torch.equal(other[case][name]["weights"][weight], tensor), weight
