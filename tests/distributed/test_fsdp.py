"""Two real ranks over gloo give the results of one: both run the same scenario, and the results are compared."""

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM

from verl.algorithms.objective import PolicyObjective
from verl.algorithms.settings import AlgorithmSettings
from verl.checkpoint.save import load, save
from verl.data.flat_batch import FlatBatch
from verl.errors import EngineError
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import Schedule

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

OBJECTIVE = PolicyObjective(AlgorithmSettings(agg_mode="seq-mean-token-mean", entropy_coeff=0.1, loss_kl_coef=0.2))
PARTS = {
    1: [[[0, 1, 2, 3, 4, 5, 6]]],
    2: [[[6, 2], [0], [5, 1]], [[3, 4], [], []]],  # uneven, and the second rank runs out of sequences
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
    return FsdpEngine(FsdpSettings(str(directory / "model"), schedule=Schedule(1e-2), grad_clip=0.5, weight_decay=0.0))


def scenario(engine, directory):
    """Train, save, continue."""
    world, rank = engine.world_size, engine.rank
    local = mini_batch().split(PARTS[world][rank])
    results = {"gathered": engine.gather(torch.full((rank + 1, 2), float(rank)))}
    results["forward"] = engine.forward([*local, FlatBatch.empty()])[0].logprobs
    squares = engine.forward([*local, FlatBatch.empty()], with_squares=True)
    results["squares"] = [output.sum_pi_squared for output in squares[:-1]]
    results["same_forward"] = torch.equal(squares[0].logprobs, results["forward"])
    results["metrics"] = [engine.update(local, OBJECTIVE) for _ in range(3)]
    save(engine.state(), directory / f"saved-by-{world}")
    results["metrics"] += [engine.update(local, OBJECTIVE) for _ in range(2)]
    results["weights"] = {name: tensor.clone() for name, tensor in engine.weights()}
    return results


def resumption(engine, directory):
    """Run two more updates from a checkpoint of the other number of ranks."""
    engine.load_state(load(engine.state(), directory / f"saved-by-{3 - engine.world_size}"))
    local = mini_batch().split(PARTS[engine.world_size][engine.rank])
    return [engine.update(local, OBJECTIVE) for _ in range(2)]


def two_ranks(rank, port, root):
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port)
    for directory in (root / "untied", root / "tied"):
        results = scenario(engine(directory), directory)
        results["resumed"] = resumption(engine(directory), directory)
        torch.save(results, directory / f"found-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Run one rank here, two in separate processes, then one again; with untied and tied embeddings."""
    root = tmp_path_factory.mktemp("fsdp")
    directories = {name: root / name for name in ("untied", "tied")}
    for name, directory in directories.items():
        torch.manual_seed(0)
        Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=name == "tied")).save_pretrained(directory / "model")
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        results = {name: {"one": scenario(engine(path), path)} for name, path in directories.items()}
        run_ranks(two_ranks, 2, free_port(), root, deadline_s=300)
        for name, path in directories.items():
            results[name]["one"]["resumed"] = resumption(engine(path), path)
            results[name]["path"] = path / "model"
            results[name]["two"] = [torch.load(path / f"found-{rank}.pt", weights_only=False) for rank in range(2)]
    finally:
        dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def models(both):
    return {name: results["path"] for name, results in both.items()}


@pytest.fixture(params=["untied", "tied"])
def results(request, both):
    return both[request.param]


def test_both_ranks_report_the_same_metrics_and_weights(results):
    first, second = results["two"]
    assert first["metrics"] == second["metrics"]
    assert first["weights"].keys() == second["weights"].keys()
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])


@torch.no_grad()
def test_sums_of_squared_probabilities_are_those_of_transformers(both, models):
    for name, path in models.items():
        model, batch = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), mini_batch()
        rows = [
            model(row[None]).logits[0].softmax(-1).square().sum(-1)
            for row in batch.tokens.split(batch.lengths.tolist())
        ]
        expected = torch.where(batch.mask, torch.cat([row.roll(1) for row in rows]), 0.0)
        for world, ranks in {1: [both[name]["one"]], 2: both[name]["two"]}.items():
            for parts, results in zip(PARTS[world], ranks, strict=True):
                assert results["same_forward"]
                for indices, squares in zip(parts, results["squares"], strict=True):
                    right = batch.with_(advantages=expected).select(torch.tensor(indices, dtype=torch.int64)).advantages
                    torch.testing.assert_close(squares, right, atol=1e-5, rtol=1e-4)


def test_two_ranks_train_like_one(results):
    for metrics, expected in zip(results["two"][0]["metrics"], results["one"]["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)
    for name, tensor in results["one"]["weights"].items():
        torch.testing.assert_close(results["two"][0]["weights"][name], tensor, atol=2e-3, rtol=1e-2)


def test_forward_on_a_shard_is_forward_on_the_whole(results):
    whole = mini_batch().with_(old_logprobs=results["one"]["forward"])
    for rank in range(2):
        expected = whole.select(PARTS[2][rank][0]).old_logprobs
        torch.testing.assert_close(results["two"][rank]["forward"], expected, atol=1e-5, rtol=1e-5)


def test_gather_concatenates_uneven_rows_in_rank_order(results):
    for rank in range(2):
        assert results["two"][rank]["gathered"].tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


def test_a_checkpoint_of_one_rank_resumes_on_two(results):
    for metrics, expected in zip(results["two"][0]["resumed"], results["one"]["metrics"][3:], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_a_checkpoint_of_two_ranks_resumes_on_one(results):
    for metrics, expected in zip(results["one"]["resumed"], results["two"][0]["metrics"][3:], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_an_engine_without_a_process_group_names_the_call_to_make():
    with pytest.raises(EngineError, match="call init_process_group"):
        FsdpEngine(FsdpSettings("nowhere"))
