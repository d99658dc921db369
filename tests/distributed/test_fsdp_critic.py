"""A critic gives the same results on two real ranks as on one, though its one-row head is on one rank only."""

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification

from verl.algorithms.aggregate import MODES
from verl.algorithms.objective import ValueObjective
from verl.algorithms.settings import AlgorithmSettings
from verl.checkpoint.save import load, save
from verl.data.flat_batch import FlatBatch
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import Schedule

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

PARTS = {
    1: [[[0, 1, 2, 3, 4, 5, 6]]],
    2: [[[6, 2], [0], [5, 1]], [[3, 4], [], []]],  # uneven, and the second rank runs out of sequences
}
CHECKPOINTS = ("new-tied", "scored")
MODE = "seq-mean-token-mean"


def mini_batch():
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 9, 9, 3, 12, 4, 7]
    offsets, total = torch.tensor([0, *lengths]).cumsum(0), sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.6
    mask[offsets[:-1]] = False
    mask[offsets[3] : offsets[4]] = False
    old, returns = torch.randn(2, total, generator=generator)
    tokens = torch.randint(64, (total,), generator=generator)
    return FlatBatch(tokens, offsets, mask, values=0.1 * old, returns=1 + returns)


def objective(mode=MODE):
    return ValueObjective(AlgorithmSettings(value_clip=0.5, value_agg_mode=mode, scale=12.0))


class Recorder(FsdpEngine):
    """An engine that keeps the gradient before clipping."""

    def _step(self, lr, *, has_tokens):
        self.gradients = {name: weight.grad.full_tensor().clone() for name, weight in self.model.hf.named_parameters()}
        return super()._step(lr, has_tokens=has_tokens)


def engine(directory, **changes):
    settings = {"schedule": Schedule(1e-2), "grad_clip": 0.5, "weight_decay": 0.0, **changes}
    return Recorder(FsdpSettings(str(directory / "model"), head="value", role="critic", **settings))


def local(engine):
    return mini_batch().split(PARTS[engine.world_size][engine.rank])


def scenario(directory):
    """Train, save, continue; then the gradients of each mode, and one update with a bfloat16 backbone."""
    critic = engine(directory)
    results = {"metrics": [critic.update(local(critic), objective()) for _ in range(3)]}
    save(critic.state(), directory / f"saved-by-{critic.world_size}")
    results["metrics"] += [critic.update(local(critic), objective()) for _ in range(2)]
    results["values"] = critic.forward([*local(critic), FlatBatch.empty()])[0].values
    results["gradients"] = {}
    for mode in MODES:
        critic = engine(directory)
        critic.update(local(critic), objective(mode))
        results["gradients"][mode] = critic.gradients
    rough = engine(directory, param_dtype="bfloat16", compute_dtype="bfloat16")
    results["bfloat16"] = rough.update(local(rough), objective())
    return results


def resumption(directory):
    """Run two more updates from a checkpoint of the other number of ranks."""
    critic = engine(directory)
    critic.load_state(load(critic.state(), directory / f"saved-by-{3 - critic.world_size}"))
    return [critic.update(local(critic), objective()) for _ in range(2)]


def two_ranks(rank, port, root):
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port)
    for name in CHECKPOINTS:
        results = scenario(root / name)
        torch.save(results | {"resumed": resumption(root / name)}, root / name / f"found-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Run one rank here, two in separate processes, then one again."""
    root = tmp_path_factory.mktemp("critic")
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True)).save_pretrained(root / "new-tied" / "model")
    Qwen2ForTokenClassification(tiny_qwen2(num_labels=1)).save_pretrained(root / "scored" / "model")
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        results = {name: {"one": scenario(root / name)} for name in CHECKPOINTS}
        run_ranks(two_ranks, 2, free_port(), root, deadline_s=300)
        for name in CHECKPOINTS:
            results[name]["one"]["resumed"] = resumption(root / name)
            results[name]["two"] = [
                torch.load(root / name / f"found-{rank}.pt", weights_only=False) for rank in range(2)
            ]
    finally:
        dist.destroy_process_group()
    return results


@pytest.fixture(params=CHECKPOINTS)
def results(request, both):
    return both[request.param]


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_does_not_depend_on_the_number_of_ranks(results, mode):
    expected = results["one"]["gradients"][mode]
    assert expected["score.weight"].any()
    for name, gradient in expected.items():
        spare = 1e-4 * float(gradient.abs().max()) + 1e-7  # the gradient of a key's bias is only rounding
        torch.testing.assert_close(results["two"][0]["gradients"][mode][name], gradient, atol=spare, rtol=1e-3)


def test_the_backbone_gets_a_gradient_through_a_head_that_is_not_zero(both):
    assert all(gradient.any() for gradient in both["scored"]["two"][0]["gradients"][MODE].values())


def test_two_ranks_train_like_one(results):
    first, second = results["two"]
    assert first["metrics"] == second["metrics"]
    for metrics, expected in zip(first["metrics"], results["one"]["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert first["metrics"][-1]["critic/vf_loss"] < first["metrics"][0]["critic/vf_loss"]


def test_values_on_a_shard_are_values_on_the_whole(results):
    whole = mini_batch().with_(values=results["one"]["values"])
    for rank in range(2):
        expected = whole.select(PARTS[2][rank][0]).values
        torch.testing.assert_close(results["two"][rank]["values"], expected, atol=2e-3, rtol=1e-2)


def test_a_checkpoint_resumes_on_another_number_of_ranks(results):
    one, two = results["one"], results["two"][0]
    for resumed, saved in [(one, two), (two, one)]:
        for metrics, expected in zip(resumed["resumed"], saved["metrics"][3:], strict=True):
            assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_a_head_in_float32_trains_with_a_backbone_in_bfloat16(results):
    one, two = results["one"], results["two"][0]
    assert two["bfloat16"] == pytest.approx(one["bfloat16"], rel=3e-2, abs=1e-3)
    assert two["bfloat16"] == pytest.approx(two["metrics"][0], rel=5e-2, abs=1e-2)
