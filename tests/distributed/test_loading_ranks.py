"""Four real ranks read their own slices, share one parse of an index, and sum metrics."""

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from tiny import save_family, tiny_qwen2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification

from verl.checkpoint import save as saving
from verl.checkpoint.save import load, save
from verl.errors import CheckpointError
from verl.training.engine import sum_metrics
from verl.training.fsdp import model_loader
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import LoraSettings

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(500)]

RANKS = 4
UNEVEN = {"vocab_size": 67, "intermediate_size": 150}
ENGINES = {
    "untied": ("untied", {}),
    "tied, offloaded, bfloat16": ("tied", {"param_offload": True, "compute_dtype": "bfloat16"}),
    "bfloat16 weights": ("untied", {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}),
    "adapter": ("tied", {"lora": LoraSettings(4, seed=3)}),
    "critic": ("critic", {"head": "value"}),
    "new critic": ("tied", {"head": "value", "lora": LoraSettings(2)}),
    "moe": ("moe", {"router_replay": True}),
}


def refuse(*_, **__):
    raise model_loader.SlicingError("whole")


def build_both(make):
    """Return a model read in slices, and the same one loaded whole by every rank."""
    real, sliced = model_loader._open_in_slices, make()
    model_loader._open_in_slices = refuse
    whole = make()
    model_loader._open_in_slices = real
    return sliced, whole


def differences(sliced, whole):
    """Return the names of shards and buffers that are not equal in every bit."""
    pairs = [(dict(each.named_parameters()), dict(each.named_buffers())) for each in (sliced, whole)]
    (parameters, buffers), (others, other_buffers) = pairs
    assert whole.note
    assert not sliced.note
    assert parameters.keys() == others.keys()
    assert buffers.keys() == other_buffers.keys()
    names = [name for name, each in parameters.items() if not torch.equal(each.to_local(), others[name].to_local())]
    assert all(parameters[name].requires_grad == each.requires_grad for name, each in others.items())
    return names + [name for name, each in buffers.items() if not torch.equal(each, other_buffers[name])]


def shard_hybrid(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for part in (*model.layers(), model):
        fully_shard(part, mesh=mesh)
    return torch.device("cpu")


def compare_engines(root):
    results = {}
    for name, (folder, options) in ENGINES.items():
        sliced, whole = build_both(lambda path=root / folder, own=options: FsdpEngine(FsdpSettings(str(path), **own)))
        with sliced._weights.on_device(), whole._weights.on_device():
            results[name] = differences(sliced.model, whole.model)
    settings = FsdpSettings(str(root / "untied"))
    results["hybrid"] = differences(*build_both(lambda: model_loader.load_model(settings, shard_hybrid)))
    return results


def count_parses(root, rank):
    """Return how often this rank parsed an index while four ranks loaded one, and the error of a missing one."""
    parsed, real = [], saving.read_index

    def count(directory):
        index = real(directory)
        parsed.append(directory)
        return index

    saving.read_index = count
    engine = FsdpEngine(FsdpSettings(str(root / "untied")))
    before = {name: tensor.to_local().clone() for name, tensor in engine.state()["model"].items()}
    save(engine.state(), root / "saved")
    for parameter in engine.model.parameters():
        parameter.detach().zero_()
    engine.load_state(load(engine.state(), root / "saved"))
    after = {name: tensor.to_local() for name, tensor in engine.state()["model"].items()}
    with pytest.raises(CheckpointError) as error:
        load(engine.state(), root / "nowhere")
    is_same = all(torch.equal(before[name], tensor) for name, tensor in after.items())
    return {"parses": len(parsed), "is_same": is_same, "error": str(error.value)}


def sum_steps(rank):
    """Return the sums of the metrics of four steps."""
    shares = {"loss": torch.tensor(0.1 + rank), "kl": torch.tensor([1e16, 1.0, -1e16, 1.0], dtype=torch.float64)[rank]}
    return [
        sum_metrics({} if rank == 0 else shares),
        sum_metrics(shares),
        sum_metrics({"loss": torch.tensor(1.0)} if rank == 3 else {}),
        sum_metrics({}),
    ]


def four_ranks(rank, port, root):
    torch.set_num_threads(1)
    init_process_group(rank, RANKS, "127.0.0.1", port)
    results = {"differences": compare_engines(root), "index": count_parses(root, rank), "metrics": sum_steps(rank)}
    torch.save(results, root / f"found-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("loading")
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2(**UNEVEN)).save_pretrained(root / "untied", max_shard_size="50KB")
    Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True)).save_pretrained(root / "tied")
    Qwen2ForTokenClassification(tiny_qwen2(num_labels=1)).save_pretrained(root / "critic")
    save_family("Qwen3-MoE", root / "moe", num_experts=6)
    run_ranks(four_ranks, RANKS, free_port(), root, deadline_s=450)
    return [torch.load(root / f"found-{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("name", [*ENGINES, "hybrid"])
def test_shards_read_from_files_are_those_of_the_whole_model(results, name):
    assert [each["differences"][name] for each in results] == [[]] * RANKS


def test_one_rank_parses_the_index_for_all(results):
    assert [each["index"]["parses"] for each in results] == [1, 0, 0, 0]
    assert all(each["index"]["is_same"] for each in results)


def test_every_rank_raises_the_error_of_the_one_that_reads(results):
    assert all("nowhere: does not exist" in each["index"]["error"] for each in results)


def test_metrics_are_added_in_the_order_of_ranks(results):
    first, second, third, last = results[0]["metrics"]
    loss = [float(torch.tensor(0.1 + rank)) for rank in range(RANKS)]
    assert first == {"loss": 0.0 + loss[1] + loss[2] + loss[3], "kl": 1.0 - 1e16 + 1.0}
    assert second == {"loss": loss[0] + loss[1] + loss[2] + loss[3], "kl": 1e16 + 1.0 - 1e16 + 1.0}
    assert third == {"loss": 1.0}
    assert last == {}
    assert all(each["metrics"] == results[0]["metrics"] for each in results)
