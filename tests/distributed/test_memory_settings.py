"""Memory settings change no result: training is bit-identical with any of them, on one rank and on two."""

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM

from verl.algorithms.objective import PolicyObjective
from verl.algorithms.settings import AlgorithmSettings
from verl.checkpoint.background import BackgroundWriter
from verl.checkpoint.save import load
from verl.data.flat_batch import FlatBatch
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import Schedule

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400), pytest.mark.rotating(4)]

OBJECTIVE = PolicyObjective(
    AlgorithmSettings(agg_mode="seq-mean-token-mean", entropy_coeff=0.1, loss_kl_coef=0.2, loss_kl_type="full")
)
SETTINGS = {
    "plain": {},
    "param_offload": {"param_offload": True},
    "optimizer_offload": {"optimizer_offload": True},
    "offload_policy": {"offload_policy": True},
    "no_reshard_and_both": {"reshard_after_forward": False, "param_offload": True, "optimizer_offload": True},
    "checkpointing": {"gradient_checkpointing": True},
}
PARTS = {1: [[[0, 1], [2, 3, 4]]], 2: [[[0, 3], [2]], [[1], [4]]]}


def mini_batch():
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 9, 3, 12, 7]
    offsets, total = torch.tensor([0, *lengths]).cumsum(0), sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.6
    mask[offsets[:-1]] = False
    noise = [torch.randn(total, generator=generator) for _ in range(2)]
    tokens = torch.randint(64, (total,), generator=generator)
    return FlatBatch(tokens, offsets, mask, None, -4 + 0.3 * noise[0], None, noise[1])


def scenario(root, name):
    """Run five updates with a KL to a reference that is updated midway, with a save and a resume."""
    options = SETTINGS[name]
    kept = {key: value for key, value in options.items() if key in ("param_offload", "offload_policy")}
    made = [FsdpEngine(FsdpSettings(str(root / "model"), schedule=Schedule(1e-2), **options)) for _ in range(2)]
    reference = FsdpEngine(FsdpSettings(str(root / "model"), trainable=False, **kept))
    engine, resumed = made
    local = mini_batch().split(PARTS[engine.world_size][engine.rank])
    metrics = [engine.update(local, OBJECTIVE, reference=reference) for _ in range(2)]
    reference.copy_weights_from(engine)
    metrics.append(engine.update(local, OBJECTIVE, reference=reference))
    writer, directory = BackgroundWriter(), root / f"{name}-{engine.world_size}" / "global_step_1"
    if engine.rank == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    writer.start({"actor": engine.state()}, directory, {})
    metrics += [engine.update(local, OBJECTIVE, reference=reference) for _ in range(2)]
    writer.poll(wait=True)
    resumed.load_state(load(resumed.state(), directory / "actor"))
    again = [resumed.update(local, OBJECTIVE, reference=reference) for _ in range(2)]
    logprobs = [output.logprobs for output in engine.forward(local, reference=reference)]
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    return {"metrics": metrics, "resumed": again, "logprobs": logprobs, "weights": weights}


def two_ranks(rank, port, root):
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port)
    torch.save({name: scenario(root, name) for name in SETTINGS}, root / f"found-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    root = tmp_path_factory.mktemp("memory")
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True)).save_pretrained(root / "model")
    run_ranks(two_ranks, 2, free_port(), root, deadline_s=300)
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        one = {name: scenario(root, name) for name in SETTINGS}
    finally:
        dist.destroy_process_group()
    return {"one": [one], "two": [torch.load(root / f"found-{rank}.pt", weights_only=False) for rank in range(2)]}


@pytest.mark.parametrize("ranks", ["one", "two"])
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "plain"])
def test_losses_log_probs_and_weights_are_those_of_the_plain_run_to_the_bit(everything, ranks, name):
    for results in everything[ranks]:
        plain, other = results["plain"], results[name]
        assert other["metrics"] == plain["metrics"]
        assert all(torch.equal(one, two) for one, two in zip(other["logprobs"], plain["logprobs"], strict=True))
        assert all(torch.equal(tensor, plain["weights"][key]) for key, tensor in other["weights"].items())


@pytest.mark.parametrize("ranks", ["one", "two"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_run_continues_bit_for_bit(everything, ranks, name):
    for results in everything[ranks]:
        assert results[name]["resumed"] == results[name]["metrics"][3:]


@pytest.fixture
def group():
    init_process_group(0, 1, "127.0.0.1", 0)
    yield
    dist.destroy_process_group()


def test_offloaded_weights_and_moments_hold_no_memory_between_calls(group, tmp_path):
    Qwen2ForCausalLM(tiny_qwen2()).save_pretrained(tmp_path)
    engine = FsdpEngine(FsdpSettings(str(tmp_path), param_offload=True, optimizer_offload=True))

    def held():
        moments = [each for state in engine.optimizer.state.values() for each in state.values() if each.ndim]
        tensors = [*engine.model.parameters(), *moments]
        return len(tensors), sum(each.to_local().untyped_storage().nbytes() for each in tensors)

    weights = len([*engine.model.parameters()])
    assert held() == (weights, 0)
    engine.forward([mini_batch()])
    assert held() == (weights, 0)
    engine.update([mini_batch()], PolicyObjective())
    assert held() == (3 * weights, 0)
    engine.state()
    assert len([*engine.weights()]) == weights
    assert held() == (3 * weights, 0)


def test_master_weights_in_float32_keep_what_bfloat16_would_round_away(group, tmp_path):
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2()).save_pretrained(tmp_path)
    before, after = {}, {}
    for kept in ("float32", "bfloat16"):
        settings = FsdpSettings(
            str(tmp_path),
            param_dtype=kept,
            compute_dtype="bfloat16",
            schedule=Schedule(1e-6),
            weight_decay=0.0,
            grad_clip=None,
        )
        engine = FsdpEngine(settings)
        name = "model.norm.weight"  # ones, to which 1e-6 adds nothing in bfloat16
        before[kept] = dict(engine.weights())[name].clone()
        for _ in range(3):
            engine.update([mini_batch()], PolicyObjective())
        after[kept] = dict(engine.weights())[name].clone()
        moments = [each for state in engine.optimizer.state.values() for each in state.values() if each.ndim]
        assert {each.dtype for each in moments} == {getattr(torch, kept)}
    assert torch.equal(after["bfloat16"], before["bfloat16"])
    assert not torch.equal(after["float32"], before["float32"])
    assert torch.equal(after["float32"].bfloat16(), before["float32"].bfloat16())
