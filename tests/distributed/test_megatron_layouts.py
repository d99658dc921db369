"""Megatron-Core on four ranks trains like FSDP2 on one in every layout, and checkpoints of any layout fit any other."""

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from tiny import save_family, tiny_qwen2
from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification

from tests.distributed.test_parallel_layouts import OBJECTIVE, PARTS, SPARE, mini_batch
from verl.algorithms.objective import ValueObjective
from verl.algorithms.settings import AlgorithmSettings
from verl.checkpoint.save import load, save
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import Schedule

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")

DENSE = {
    "data": {},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "tensor and pipeline": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tensor and context": {"tensor_parallel_size": 2, "context_parallel_size": 2},
}
EXPERTS = {
    "experts": {"expert_parallel_size": 2},
    "experts and pipeline": {"expert_parallel_size": 2, "pipeline_parallel_size": 2},
    "experts and tensor": {"expert_parallel_size": 4, "tensor_parallel_size": 2},
    "experts and context": {"expert_parallel_size": 2, "context_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
}
TWO = {name: DENSE[name] for name in ("tensor", "tensor and pipeline")}
ONE = {"tensor and pipeline": TWO["tensor and pipeline"]}
THREE = TWO | {"context": {"context_parallel_size": 2}}
CASES = {
    "untied": DENSE,
    "tied": TWO,
    "odd vocabulary": TWO,
    "Qwen3": ONE,
    "Llama 3": ONE,
    "Qwen3-MoE": EXPERTS,
    "critic": THREE,
}
VALUES = ValueObjective(AlgorithmSettings(value_clip=10.0, value_agg_mode="seq-mean-token-mean"))
OPTIONS = {"schedule": Schedule(1e-2), "eps": 1e-3, "weight_decay": 0.1}


def options(case):
    return {**OPTIONS, **({"head": "value", "role": "critic"} if case == "critic" else {})}


def fsdp(root, case):
    return FsdpEngine(FsdpSettings(str(root / case), **options(case)))


def megatron(root, case, layout):
    from tests.megatron_on_cpu import build_engine, leave_layout  # in processes of their own
    from verl.training.megatron.settings import MegatronSettings

    leave_layout()
    return build_engine(MegatronSettings(str(root / case), **options(case), **CASES[case][layout]))


def batches(case):
    batch = mini_batch("adamw")
    if case == "odd vocabulary":
        batch = batch.with_(tokens=batch.tokens % 61)
    return batch.with_(values=batch.old_logprobs + 4, returns=batch.ref_logprobs + 5)


def train(engine, case, updates):
    local = batches(case).split(PARTS[engine.layout.data_size][engine.data_rank])
    objective = VALUES if case == "critic" else OBJECTIVE
    output = engine.forward([batches(case)])[0]
    metrics = [engine.update(local, objective) for _ in range(updates)]
    return {
        "output": output,
        "metrics": metrics,
        "weights": {name: tensor.clone() for name, tensor in engine.weights()},
        "shapes": [(name, tensor.shape) for name, tensor in engine.weight_shapes()],
        "divergence": engine.find_divergence(),
    }


def scenario(root, case, layout, source=None):
    """Run two updates and save; or, from a checkpoint, two more."""
    engine = megatron(root, case, layout)
    if source is not None:
        engine.load_state(load(engine.state(), root / f"{case}-{source}"))
    result = train(engine, case, 2)
    if source is None:
        save(engine.state(), root / f"{case}-{layout}")
    return result


def four_ranks(rank, port, root):
    torch.set_num_threads(1)
    init_process_group(rank, 4, "127.0.0.1", port)
    results = {}
    for case, layouts in CASES.items():
        names = list(layouts)
        results[case] = {name: scenario(root, case, name) for name in names}
        for name, source in zip(names, [*names[1:], "fsdp"], strict=True):
            results[case][f"{source} -> {name}"] = scenario(root, case, name, source)
    torch.save(results, root / f"results-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Train with FSDP2 on one rank here, and in every layout of Megatron-Core on four ranks in separate processes."""
    root = tmp_path_factory.mktemp("megatron")
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2ForCausalLM(tiny_qwen2(**sizes)).save_pretrained(root / "untied")
    Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True, **sizes)).save_pretrained(root / "tied")
    Qwen2ForCausalLM(tiny_qwen2(vocab_size=61, **sizes)).save_pretrained(root / "odd vocabulary")
    Qwen2ForTokenClassification(tiny_qwen2(num_labels=1, **sizes)).save_pretrained(root / "critic")
    for name in ("Qwen3", "Llama 3", "Qwen3-MoE"):
        save_family(name, root / name, **sizes)
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        one = {}
        for case in CASES:
            engine = fsdp(root, case)
            first = train(engine, case, 2)
            save(engine.state(), root / f"{case}-fsdp")
            one[case] = [first, train(engine, case, 2)]
    finally:
        dist.destroy_process_group()
    run_ranks(four_ranks, 4, free_port(), root, deadline_s=800)
    one["root"] = root
    return one, [torch.load(root / f"results-{rank}.pt", weights_only=False) for rank in range(4)]


NAMES = [
    (case, name, is_resumed)
    for case, layouts in CASES.items()
    for name, is_resumed in [
        *((name, False) for name in layouts),
        *((f"{source} -> {name}", True) for name, source in zip(layouts, [*list(layouts)[1:], "fsdp"], strict=True)),
    ]
]


@pytest.mark.parametrize(("case", "name", "is_resumed"), NAMES)
def test_outputs_metrics_and_weights_are_those_of_fsdp_on_one_rank(both, case, name, is_resumed):
    one, four = both
    expected, result = one[case][is_resumed], four[0][case][name]
    for mine, theirs in zip(result["output"], expected["output"], strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, atol=SPARE, rtol=SPARE)
    for metrics, those in zip(result["metrics"], expected["metrics"], strict=True):
        assert metrics == pytest.approx(those, rel=SPARE, abs=SPARE)
    assert result["divergence"] == ""
    assert result["weights"].keys() == expected["weights"].keys()
    assert [(name, tensor.shape) for name, tensor in result["weights"].items()] == result["shapes"]
    for weight, tensor in expected["weights"].items():
        torch.testing.assert_close(result["weights"][weight], tensor, atol=SPARE, rtol=SPARE, msg=weight)


@pytest.mark.parametrize(("case", "name"), [(case, name) for case, name, _ in NAMES])
def test_all_ranks_report_the_same(both, case, name):
    _, four = both
    for other in four[1:]:
        assert other[case][name]["metrics"] == four[0][case][name]["metrics"]
        for mine, theirs in zip(other[case][name]["output"], four[0][case][name]["output"], strict=True):
            assert mine is theirs is None or torch.equal(mine, theirs)
        for weight, tensor in four[0][case][name]["weights"].items():
            assert torch.equal(other[case][name]["weights"][weight], tensor), weight


@pytest.mark.parametrize(("case", "layout"), [(case, layout) for case, layouts in CASES.items() for layout in layouts])
def test_fsdp_continues_from_a_checkpoint_of_megatron(both, case, layout):
    one, _ = both
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        engine = fsdp(one["root"], case)
        engine.load_state(load(engine.state(), one["root"] / f"{case}-{layout}"))
        result = train(engine, case, 2)
    finally:
        dist.destroy_process_group()
    for metrics, those in zip(result["metrics"], one[case][1]["metrics"], strict=True):
        assert metrics == pytest.approx(those, rel=SPARE, abs=SPARE)
    for weight, tensor in one[case][1]["weights"].items():
        torch.testing.assert_close(result["weights"][weight], tensor, atol=SPARE, rtol=SPARE, msg=weight)
