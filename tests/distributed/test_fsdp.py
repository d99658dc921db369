"""Two real ranks over gloo do what one does: the same scenario runs on both and their findings are compared."""

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM

from verl.algorithms.objective import PolicyObjective
from verl.checkpoint.save import load, save
from verl.data.flat_batch import FlatBatch
from verl.errors import EngineError
from verl.training.fsdp import FsdpEngine, FsdpSettings
from verl.training.process_group import init_process_group

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

OBJECTIVE = PolicyObjective(agg_mode="seq-mean-token-mean", entropy_coeff=0.1, kl_coef=0.2)
PARTS = {
    1: [[[0, 1, 2, 3, 4, 5, 6]]],
    2: [[[6, 2], [0], [5, 1]], [[3, 4], [], []]],  # uneven, and the second rank runs dry
}


def mini_batch():
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 9, 9, 3, 12, 4, 7]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.6
    mask[offsets[:-1]] = False
    mask[offsets[3] : offsets[4]] = False
    noise = [torch.randn(total, generator=generator) for _ in range(3)]
    tokens = torch.randint(64, (total,), generator=generator)
    return FlatBatch(tokens, offsets, mask, None, -4 + 0.3 * noise[0], -4 + 0.3 * noise[1], noise[2])


def engine(directory):
    return FsdpEngine(FsdpSettings(str(directory / "model"), lr=1e-2, grad_clip=0.5, weight_decay=0.0))


def scenario(engine, directory):
    """Train, save, train on."""
    world, rank = engine.world_size, engine.rank
    mine = mini_batch().split(PARTS[world][rank])
    found = {"gathered": engine.gather(torch.full((rank + 1, 2), float(rank)))}
    found["forward"] = engine.forward([*mine, FlatBatch.empty()])[0].logprobs
    found["metrics"] = [engine.update(mine, OBJECTIVE) for _ in range(3)]
    save(engine.state(), directory / f"saved-by-{world}")
    found["metrics"] += [engine.update(mine, OBJECTIVE) for _ in range(2)]
    found["weights"] = {name: tensor.clone() for name, tensor in engine.weights()}
    return found


def resumption(engine, directory):
    """Two more updates on what the other number of ranks saved."""
    engine.load_state(load(engine.state(), directory / f"saved-by-{3 - engine.world_size}"))
    mine = mini_batch().split(PARTS[engine.world_size][engine.rank])
    return [engine.update(mine, OBJECTIVE) for _ in range(2)]


def two_ranks(rank, port, root):
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port)
    for directory in (root / "untied", root / "tied"):
        found = scenario(engine(directory), directory)
        found["resumed"] = resumption(engine(directory), directory)
        torch.save(found, directory / f"found-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """One rank here, then two in processes of their own, then one again; with untied and tied embeddings."""
    root = tmp_path_factory.mktemp("fsdp")
    directories = {name: root / name for name in ("untied", "tied")}
    for name, directory in directories.items():
        torch.manual_seed(0)
        Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=name == "tied")).save_pretrained(directory / "model")
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        found = {name: {"one": scenario(engine(path), path)} for name, path in directories.items()}
        run_ranks(two_ranks, 2, free_port(), root, deadline_s=300)
        for name, path in directories.items():
            found[name]["one"]["resumed"] = resumption(engine(path), path)
            found[name]["two"] = [torch.load(path / f"found-{rank}.pt", weights_only=False) for rank in range(2)]
    finally:
        dist.destroy_process_group()
    return found


@pytest.fixture(params=["untied", "tied"])
def found(request, both):
    return both[request.param]


def test_both_ranks_report_the_same_metrics_and_weights(found):
    first, second = found["two"]
    assert first["metrics"] == second["metrics"]
    assert first["weights"].keys() == second["weights"].keys()
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])


def test_two_ranks_train_like_one(found):
    for metrics, expected in zip(found["two"][0]["metrics"], found["one"]["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)
    for name, tensor in found["one"]["weights"].items():
        torch.testing.assert_close(found["two"][0]["weights"][name], tensor, atol=2e-3, rtol=1e-2)


def test_forward_on_a_shard_is_forward_on_the_whole(found):
    whole = mini_batch().with_(old_logprobs=found["one"]["forward"])
    for rank in range(2):
        expected = whole.select(PARTS[2][rank][0]).old_logprobs
        torch.testing.assert_close(found["two"][rank]["forward"], expected, atol=1e-5, rtol=1e-5)


def test_gather_lays_uneven_rows_rank_after_rank(found):
    for rank in range(2):
        assert found["two"][rank]["gathered"].tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


def test_a_checkpoint_of_one_rank_goes_on_on_two(found):
    for metrics, expected in zip(found["two"][0]["resumed"], found["one"]["metrics"][3:], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_a_checkpoint_of_two_ranks_goes_on_on_one(found):
    for metrics, expected in zip(found["one"]["resumed"], found["two"][0]["metrics"][3:], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_an_engine_without_a_group_says_what_to_call():
    with pytest.raises(EngineError, match="call init_process_group"):
        FsdpEngine(FsdpSettings("nowhere"))
