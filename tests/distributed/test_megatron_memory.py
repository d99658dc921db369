"""The memory plan of Megatron-Core counts the weights, gradients and optimizer state that real ranks have."""

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from tiny import save_family
from transformers import AutoConfig

from verl.algorithms.objective import sft
from verl.data.flat_batch import FlatBatch
from verl.memory_plan.megatron_memory import MegatronMemory
from verl.memory_plan.model_memory import PassSize
from verl.models.model_shape import ModelShape
from verl.training.megatron.settings import MegatronSettings
from verl.training.process_group import init_process_group

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600), pytest.mark.rotating(4)]
pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")

SPLIT = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
CASES = {
    "data": ("Qwen3", {}),
    "tensor and pipeline": ("Qwen3", SPLIT),
    "context": ("Qwen3", {"context_parallel_size": 2}),
    "bfloat16": ("Qwen3", {"pipeline_parallel_size": 2, "compute_dtype": "bfloat16"}),
    "experts": ("Qwen3-MoE", {"expert_parallel_size": 4, "compute_dtype": "bfloat16"}),
    "all": ("Qwen3-MoE", SPLIT | {"expert_parallel_size": 2}),
}
SIZES = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
TOKENS = 16


def settings_of(root, case):
    family, changes = CASES[case]
    return MegatronSettings(str(root / family), **changes)


def four_ranks(rank, port, root):
    from tests.megatron_on_cpu import build_engine, leave_layout

    torch.set_num_threads(1)
    init_process_group(rank, 4, "127.0.0.1", port)
    mask = torch.arange(TOKENS) > 0
    batch = FlatBatch(torch.arange(TOKENS), torch.tensor([0, TOKENS]), mask)
    found = {}
    for case in CASES:
        leave_layout()
        engine = build_engine(settings_of(root, case))
        engine.update([batch], sft)
        module = engine._forward_module
        buffers = [each.grad_data for name in ("buffers", "expert_parallel_buffers") for each in getattr(module, name)]
        found[case] = [
            sum(each.nbytes for each in tensors)
            for tensors in (list(engine._module.parameters()), buffers, list(engine._iter_moments()))
        ]
    gathered = [None] * 4
    dist.all_gather_object(gathered, found)
    if rank == 0:
        torch.save(gathered, root / "found.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    root = tmp_path_factory.mktemp("memory")
    for family in ("Qwen3", "Qwen3-MoE"):
        save_family(family, root / family, **SIZES, num_key_value_heads=2)
    run_ranks(four_ranks, 4, free_port(), root, deadline_s=500)
    return root, torch.load(root / "found.pt")


@pytest.mark.parametrize("case", CASES)
def test_weights_gradients_and_optimizer_state_are_those_of_the_plan(measured, case):
    root, found = measured
    settings, size = settings_of(root, case), PassSize(TOKENS, TOKENS)
    shape = ModelShape.from_config(AutoConfig.from_pretrained(settings.model_path).to_dict())
    rest = MegatronMemory(shape, settings, 4, size, size).at_rest()
    most = max((each[case] for each in found), key=sum)
    assert [rest.weights, rest.gradients, rest.moments] == pytest.approx(most, rel=0.05)
