"""Plans of runs that train with Megatron-Core: a layout with which they fit, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from public_models import MODELS

from verl.config.checks.megatron import find_conflicts
from verl.config.load import load
from verl.config.paths import change_settings
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.memory_plan.accelerators import GIB, assume_device
from verl.memory_plan.megatron_memory import MegatronMemory
from verl.memory_plan.model_memory import PassSize
from verl.memory_plan.out_of_memory import rl_memory_advice
from verl.memory_plan.run_plan import get_cluster, get_workload, plan_memory
from verl.memory_plan.step_time import estimate_step
from verl.memory_plan.suggestions import rank_suggestions, suggest_settings
from verl.models.model_shape import ModelShape
from verl.trainer.build.worker_settings import train_settings
from verl.training.megatron.settings import MegatronSettings

pytestmark = pytest.mark.unit

MEMORY, A = 80 * GIB, "actor_rollout_ref.actor"
SIZE = PassSize(8192, 4096)
Load = Callable[..., Config]


@pytest.fixture
def config(tmp_path: Path) -> Load:
    def make(model: str, nodes: int, *settings: str) -> Config:
        file = tmp_path / f"{model}.json"
        file.write_text(json.dumps(MODELS[model]))
        given = [f"actor_rollout_ref.model.path={file}", f"trainer.nnodes={nodes}", "trainer.n_gpus_per_node=8"]
        return load([*given, f"{A}.strategy=megatron", *settings], complete=False)[0].config

    return make


@pytest.mark.parametrize(
    ("model", "nodes"), [("Qwen3-30B-A3B", 2), ("Qwen2.5-72B", 8), ("Qwen3-235B-A22B", 16), ("Qwen2.5-7B", 1)]
)
def test_a_layout_is_proposed_with_which_a_large_model_fits(config: Load, model: str, nodes: int) -> None:
    settings = config(model, nodes)
    assert plan_memory(settings, train_settings).problems(MEMORY)
    changes = suggest_settings(settings, assume_device(MEMORY), train_settings)
    values = {key: value for change in changes for key, value in change.values.items()}
    assert plan_memory(change_settings(settings, values), train_settings).problems(MEMORY) == {}
    assert not any("fsdp" in key or "lora" in key for key in values)


def test_the_fastest_layout_that_fits_is_proposed(config: Load) -> None:
    settings = config("Qwen2.5-32B", 4)
    device = assume_device(MEMORY)
    best = rank_suggestions(settings, device, train_settings)[0]
    assert best.values[f"{A}.megatron.tensor_model_parallel_size"] == 4
    for layout in ((8, 1), (4, 2), (2, 4)):
        names = (f"{A}.megatron.{kind}_model_parallel_size" for kind in ("tensor", "pipeline"))
        changed = change_settings(settings, {**best.values, **dict(zip(names, layout, strict=True))})
        plan = plan_memory(changed, train_settings)
        seconds = estimate_step(plan, get_cluster(changed, device), get_workload(changed))
        assert plan.problems(MEMORY) or seconds > best.seconds


def test_experts_stay_within_a_node_if_its_links_are_faster_than_the_network(config: Load) -> None:
    best = rank_suggestions(config("Qwen3-30B-A3B", 4), assume_device(MEMORY), train_settings)[0]
    assert 1 < best.values[f"{A}.megatron.expert_model_parallel_size"] <= 8


REF_LAYOUT = "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2"


def test_a_proposed_layout_is_that_of_all_models(config: Load) -> None:
    run = config("Qwen2.5-72B", 8, f"{A}.megatron.tensor_model_parallel_size=2", f"{A}.use_kl_loss=true", REF_LAYOUT)
    best = rank_suggestions(run, assume_device(MEMORY), train_settings)[0]
    assert best.values[f"{A}.megatron.tensor_model_parallel_size"] > 2
    assert list(find_conflicts(change_settings(run, best.values))) == []


def test_experts_are_not_distributed_if_there_is_a_teacher(config: Load, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher.json"
    teacher.write_text(json.dumps(MODELS["Qwen2.5-7B"]))
    run = config("Qwen3-30B-A3B", 4, "distillation.enable=true", f"distillation.teacher.path={teacher}")
    ranked = rank_suggestions(run, assume_device(MEMORY), train_settings)
    assert not any(f"{A}.megatron.expert_model_parallel_size" in each.values for each in ranked)


def test_ranks_share_sequences_that_are_too_long_for_one(config: Load) -> None:
    settings = config("Qwen2.5-0.5B", 1, "data.max_response_length=800000")
    changes = suggest_settings(settings, assume_device(MEMORY), train_settings)
    assert [change.values for change in changes] == [{f"{A}.megatron.context_parallel_size": 2}]


def test_a_model_that_megatron_does_not_support_is_named(config: Load) -> None:
    with pytest.raises(ConfigError, match=r"deepseek_v3\): strategy=megatron supports llama, qwen2, qwen3, qwen3_moe"):
        plan_memory(config("DeepSeek-V3", 64), train_settings)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("tensor_model_parallel_size=8", "does not divide num_key_value_heads=4"),
        ("pipeline_model_parallel_size=5", "layers cannot be split over 5 pipeline stages"),
        ("pipeline_model_parallel_size=28", "pipeline_model_parallel_size=28 does not divide 16 ranks"),
        ("expert_model_parallel_size=2", "expert_model_parallel_size=2 does not divide num_experts=1"),
    ],
)
def test_a_layout_that_is_not_possible_is_an_error(config: Load, layout: str, reason: str) -> None:
    settings = config("Qwen2.5-7B", 2)
    name, size = layout.split("=")
    changed = change_settings(settings, {f"{A}.megatron.{name}": int(size)})
    with pytest.raises(ConfigError, match=reason):
        plan_memory(changed, train_settings)


def test_all_stages_together_have_all_parameters() -> None:
    for name, layout in {
        "Qwen2.5-72B": {"tensor_parallel_size": 8, "pipeline_parallel_size": 8},
        "Qwen3-30B-A3B": {"tensor_parallel_size": 2, "pipeline_parallel_size": 4, "expert_parallel_size": 4},
        "Qwen2.5-7B": {"pipeline_parallel_size": 4, "first_stage_layers": 5, "last_stage_layers": 3},
    }.items():
        shape = ModelShape.from_config(MODELS[name])
        settings = MegatronSettings(name, compute_dtype="bfloat16", **layout)
        memory = MegatronMemory(shape, settings, 64, SIZE, SIZE)
        counts = [memory.count_parameters(stage) for stage in memory.stages()]
        assert sum(stage.layers for stage in memory.stages()) == shape.layers
        total = sum(
            dense * settings.tensor_parallel_size + experts * settings.expert_parallel_size for dense, experts in counts
        )
        assert total == pytest.approx(shape.parameters, rel=1e-3)


def test_each_way_to_split_a_model_needs_less_memory_per_rank() -> None:
    shape = ModelShape.from_config(MODELS["Qwen3-30B-A3B"])

    def total(**layout: int | bool) -> int:
        settings = MegatronSettings("m", compute_dtype="bfloat16", gradient_checkpointing=True, **layout)  # type: ignore[arg-type]
        return MegatronMemory(shape, settings, 16, SIZE, SIZE).in_update().total

    one = total()
    for layout in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        assert total(**{layout: 4}) < total(**{layout: 2}) < one


def test_what_rests_on_the_device_can_be_offloaded() -> None:
    shape = ModelShape.from_config(MODELS["Qwen2.5-7B"])
    plain = MegatronMemory(shape, MegatronSettings("m", compute_dtype="bfloat16"), 8, SIZE, SIZE).at_rest()
    assert min(plain.weights, plain.gradients, plain.moments) > GIB
    settings = MegatronSettings("m", param_offload=True, grad_offload=True, optimizer_offload=True)
    assert MegatronMemory(shape, settings, 8, SIZE, SIZE).at_rest().total == 0
    frozen = MegatronSettings("m", compute_dtype="bfloat16").freeze(param_offload=False)
    assert MegatronMemory(shape, frozen, 8, SIZE).at_rest().total == plain.weights


def test_advice_after_an_out_of_memory_error_names_settings_of_the_engine(config: Load) -> None:
    advice = rl_memory_advice(config("Qwen2.5-7B", 1))
    assert f"{A}.megatron.grad_offload=True" in advice
    assert "fsdp" not in advice
