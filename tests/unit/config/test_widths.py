"""Engines of several devices are refused where they do not fit, before anything starts."""

import pytest

from verl.config.batch_sizes import (
    count_engine_devices,
    count_engines,
    count_extra_devices,
    count_group_devices,
    count_rollout_devices,
    count_train_ranks,
)
from verl.config.features import frees_engine_memory
from verl.config.load import load_dict
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.rollout.vllm.settings import VllmSettings
from verl.trainer.build.preflight import check_engine_layout
from verl.trainer.build.worker_settings import engine_settings

pytestmark = pytest.mark.unit

R = "actor_rollout_ref.rollout"
M = "reward.reward_model"


REQUIRED = ("actor_rollout_ref.model.path=model", "data.train_files=train.parquet", "trainer.n_gpus_per_node=8")


def find_config(*settings: str) -> Config:
    return load_dict({}, [*REQUIRED, *settings]).config


def find_problems(*settings: str) -> list[str]:
    try:
        load_dict({}, [*REQUIRED, *settings])
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_widths_that_divide_a_node_are_accepted(width: int) -> None:
    assert find_problems(f"{R}.tensor_model_parallel_size={width}", "trainer.nnodes=4") == []


@pytest.mark.parametrize(("width", "fix"), [(3, 2), (6, 4), (16, 8)])
def test_an_engine_must_not_span_nodes(width: int, fix: int) -> None:
    [problem] = find_problems(f"{R}.tensor_model_parallel_size={width}", "trainer.nnodes=4")
    assert "trainer.n_gpus_per_node=8 is not a multiple of it" in problem
    assert problem.endswith(f"set {R}.tensor_model_parallel_size={fix}")


def test_a_local_run_cannot_have_an_engine_of_several_devices() -> None:
    [problem] = find_problems(f"{R}.tensor_model_parallel_size=2", "trainer.local=True")
    assert "trainer.local=true runs all in one" in problem


def test_a_reward_model_must_fit_too() -> None:
    model = (f"{M}.enable=True", f"{M}.model_path=reward", f"{M}.rollout.name=vllm")
    assert find_problems(*model, f"{M}.rollout.tensor_model_parallel_size=4") == []
    [problem] = find_problems(*model, f"{M}.rollout.tensor_model_parallel_size=3")
    assert problem.startswith(f"{M}.rollout.tensor_model_parallel_size: 3 is not possible")


def test_engines_that_share_a_device_share_its_memory() -> None:
    model = (f"{M}.enable=True", f"{M}.model_path=reward", f"{M}.rollout.name=vllm", "trainer.device=cuda")
    [problem] = find_problems(*model, f"{R}.gpu_memory_utilization=0.6", f"{M}.rollout.gpu_memory_utilization=0.5")
    assert "0.6 + 0.5 of the reward model on the same device" in problem
    assert problem.endswith(f"set {R}.gpu_memory_utilization=0.5 and {M}.rollout.gpu_memory_utilization=0.4")


def test_there_are_no_more_engines_than_devices_for_them() -> None:
    wide = ("trainer.device=cuda", f"{R}.tensor_model_parallel_size=4")
    assert find_problems(*wide, f"{R}.num_engines=2") == []
    [problem] = find_problems(*wide, f"{R}.num_engines=3")
    assert problem.endswith(f"4 for each; set {R}.num_engines=2")


def test_engines_with_devices_of_their_own_are_counted_and_checked_by_these() -> None:
    separate = ("actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=3", "trainer.device=cuda")
    [problem] = find_problems(*separate)
    assert problem.endswith(f"set {R}.n_gpus_per_node=N")
    own = (*separate, f"{R}.n_gpus_per_node=8", f"{R}.nnodes=2")
    config = find_config(*own, f"{R}.tensor_model_parallel_size=4")
    assert (count_engines(config), count_rollout_devices(config), count_extra_devices(config)) == (4, 16, 16)
    assert (count_train_ranks(config), count_group_devices(config)) == (3, 1)
    assert not frees_engine_memory(config, "cuda")
    [problem] = find_problems(*own, f"{R}.tensor_model_parallel_size=3")
    assert f"{R}.n_gpus_per_node=8 is not a multiple of it" in problem


def test_nccl_reaches_other_devices_and_ipc_the_same_ones() -> None:
    cuda, own = "trainer.device=cuda", ("actor_rollout_ref.hybrid_engine=False", f"{R}.n_gpus_per_node=1")
    [problem] = find_problems(cuda, f"{R}.weight_transport=nccl")
    assert problem.endswith(f"set {R}.weight_transport=ipc, or host")
    [problem] = find_problems(cuda, *own, f"{R}.weight_transport=ipc")
    assert problem.endswith(f"set {R}.weight_transport=nccl, or host")
    assert not find_problems(cuda, *own, f"{R}.weight_transport=nccl")
    assert not find_problems(cuda, f"{R}.weight_transport=ipc")


def test_pipeline_and_data_parallel_sizes_multiply_the_devices_of_an_engine() -> None:
    layout = (f"{R}.tensor_model_parallel_size=2", f"{R}.pipeline_model_parallel_size=2", f"{R}.data_parallel_size=2")
    config = find_config(*layout, f"{R}.expert_parallel_size=4", "trainer.nnodes=2")
    assert (count_engine_devices(config), count_group_devices(config), count_engines(config)) == (8, 8, 2)
    settings = engine_settings(config, "cuda", 0)
    assert isinstance(settings, VllmSettings)
    assert (settings.pipeline_parallel_size, settings.data_parallel_size, settings.expert_parallel) == (2, 2, True)


def test_an_engine_over_stages_must_not_span_nodes_either() -> None:
    [problem] = find_problems(f"{R}.tensor_model_parallel_size=4", f"{R}.pipeline_model_parallel_size=4")
    assert problem.startswith(f"{R}.tensor_model_parallel_size: 4 x 4 (pipeline x data parallel size) is not possible")
    assert problem.endswith("reduce them to 8 devices")


def test_an_engine_distributes_its_experts_over_all_devices_or_none() -> None:
    [problem] = find_problems(f"{R}.tensor_model_parallel_size=4", f"{R}.expert_parallel_size=2")
    assert problem.endswith(f"set {R}.expert_parallel_size=4")


def test_engines_on_cpus_have_no_stages_and_no_distributed_experts() -> None:
    layout = (f"{R}.tensor_model_parallel_size=2", f"{R}.expert_parallel_size=2")
    [problem] = find_problems(*layout, "trainer.device=cpu")
    with pytest.raises(ConfigError) as refused:
        check_engine_layout(find_config(*layout), "cpu")
    assert refused.value.problems == [problem]
    assert problem.endswith(f"set {R}.expert_parallel_size=1")
    check_engine_layout(find_config(*layout), "cuda")


def test_lent_devices_have_room_for_whole_engines_and_get_weights_through_host_memory() -> None:
    own = ("actor_rollout_ref.hybrid_engine=False", f"{R}.n_gpus_per_node=4", "trainer.device=cuda")
    lending = (*own, f"{R}.lend_train_devices=True")
    assert find_problems(*lending, "trainer.n_gpus_per_node=2", f"{R}.tensor_model_parallel_size=2") == []
    [problem] = find_problems(*lending, "trainer.n_gpus_per_node=3", f"{R}.tensor_model_parallel_size=2")
    assert "lend_train_devices: True is not possible: an engine needs 2 devices of one node" in problem
    [problem] = find_problems(*lending, f"{R}.weight_transport=nccl")
    assert "nccl does not reach both kinds of engines" in problem
