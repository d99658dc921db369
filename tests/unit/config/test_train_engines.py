"""The registry of training engines, and the check of settings against what an engine supports."""

from __future__ import annotations

import pytest

import tests.toy_train_engine  # noqa: F401 - registers the engine `toy`
from verl.config.batch_sizes import count_data_ranks, count_rank_multiple, get_actor_batch_sizes
from verl.config.checks.train_engine import find_conflicts
from verl.config.load import load, load_sft
from verl.config.train_engines import TrainEngineSpec, get_train_engine, list_train_engines, register_train_engine
from verl.errors import ConfigError

pytestmark = pytest.mark.unit

A = "actor_rollout_ref.actor"
REQUIRED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=tiny", "trainer.n_gpus_per_node=1"]
TOY = f"{A}.strategy=toy"


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load([*REQUIRED, *overrides])
    return raised.value.problems


def test_a_registered_engine_is_a_valid_strategy() -> None:
    [loaded] = load([*REQUIRED, TOY])
    assert loaded.config.actor_rollout_ref.actor.strategy == "toy"
    [loaded] = load_sft(["data.train_files=a.parquet", "model.path=tiny", "model.strategy=toy"], complete=False)
    assert loaded.config.model.strategy == "toy"


def test_an_unknown_engine_is_refused_with_the_name_that_is_close() -> None:
    [problem] = problems(f"{A}.strategy=fsdp3")
    assert problem.startswith(f"{A}.strategy: fsdp3 must be one of fsdp2, ")
    assert problem.endswith(f"set {A}.strategy=fsdp2")


def test_all_settings_that_an_engine_does_not_support_are_reported_at_once() -> None:
    found = problems(
        TOY,
        f"{A}.peft.lora_rank=8",
        f"{A}.optim.name=muon",
        f"{A}.fsdp_config.model_dtype=bfloat16",
        f"{A}.use_kl_loss=True",
        f"{A}.kl_loss_type=full",
        f"{A}.use_prefix_grouper=True",
    )
    mask = "actor_rollout_ref.rollout.keep_sampling_mask"
    assert problems(TOY, f"{mask}=true", "actor_rollout_ref.rollout.top_k=50")[0].startswith(f"{mask}: true is not")
    keys = ["peft.lora_rank", "optim.name", "fsdp_config.model_dtype", "kl_loss_type", "use_prefix_grouper"]
    assert [problem.split(":")[0] for problem in found] == [f"{A}.{key}" for key in keys]
    assert found[0] == (
        f"{A}.peft.lora_rank: 8 is not supported by the training engine toy; set {A}.peft.lora_rank=0, or "
        f"{A}.strategy=fsdp2"
    )


def test_policy_and_critic_need_the_same_engine() -> None:
    found = problems(TOY, "algorithm.adv_estimator=gae")
    assert any(problem.startswith("critic.strategy: fsdp2 and") for problem in found)
    found = problems(TOY, "critic.strategy=toy", "algorithm.adv_estimator=gae")
    assert [problem.split(":")[0] for problem in found] == ["critic.enable"]


MEGATRON = [f"{A}.strategy=megatron", "critic.strategy=megatron", "trainer.n_gpus_per_node=8"]


def test_layouts_that_megatron_cannot_have_are_refused_before_anything_starts() -> None:
    size = "model_parallel_size"
    pairs = {
        f"{A}.megatron.tensor_{size}=3": f"{A}.megatron.tensor_{size}: 3 x pipeline_{size}=1 x context_parallel_size=1",
        f"{A}.megatron.context_parallel_size=3": f"{A}.megatron.context_parallel_size: 3 x tensor_{size}=1 x",
        f"{A}.megatron.pipeline_{size}=16": f"{A}.megatron.pipeline_{size}: 16 x tensor_{size}=1 x",
        f"{A}.megatron.expert_{size}=16": f"{A}.megatron.expert_{size}: 16 x pipeline_{size}=1 does not divide the 8",
        f"actor_rollout_ref.ref.megatron.tensor_{size}=2": "all models have one layout",
        f"{A}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=1": "of 2 or more",
        f"{A}.peft.lora_rank=8": "8 is not supported by the training engine megatron",
        f"{A}.use_prefix_grouper=true": "true is not supported by the training engine megatron",
        "trainer.device=cpu": f"{A}.strategy: megatron needs accelerators",
    }
    for override, text in pairs.items():
        assert any(text in problem for problem in problems(*MEGATRON, override)), override
    found = problems(*MEGATRON, "algorithm.adv_estimator=gae", f"{A}.megatron.tensor_{size}=2")
    assert [problem.split(":")[0] for problem in found] == [f"critic.megatron.tensor_{size}"]
    both = [f"{section}.megatron.tensor_{size}=2" for section in (A, "critic")]
    load([*REQUIRED, *MEGATRON, "algorithm.adv_estimator=gae", *both])
    average = [f"{A}.use_kl_loss=true", "trainer.ref_update_freq=1", "trainer.ref_update_ratio=0.5"]
    [problem] = problems(*MEGATRON, *average)
    assert problem.startswith("trainer.ref_update_ratio: 0.5 is not supported with strategy=megatron in bfloat16")


def test_ranks_of_megatron_get_the_same_samples_unless_they_are_data_parallel() -> None:
    sizes = ["tensor_model_parallel_size=2", "context_parallel_size=2", "expert_model_parallel_size=8"]
    layout = [f"{A}.megatron.{size}" for size in sizes]
    [loaded] = load([*REQUIRED, *MEGATRON, *layout, f"{A}.ppo_max_token_len_per_gpu=4096", f"{A}.use_dynamic_bsz=true"])
    assert (count_data_ranks(loaded.config), count_rank_multiple(loaded.config)) == (2, 8)
    assert get_actor_batch_sizes(loaded.config).micro_batch_tokens == 2 * 4096


def test_settings_of_another_training_engine_have_no_effect() -> None:
    [loaded] = load([*REQUIRED, *MEGATRON, f"{A}.fsdp_config.dtype=float32"])
    assert [hint for hint in loaded.hints if hint.startswith(f"{A}.fsdp_config.dtype=float32 has no effect")]
    [loaded] = load([*REQUIRED, f"{A}.megatron.tensor_model_parallel_size=2"])
    assert [hint for hint in loaded.hints if "megatron.tensor_model_parallel_size=2 has no effect" in hint]


def test_fsdp_supports_everything() -> None:
    settings = [f"{A}.peft.lora_rank=8", f"{A}.fsdp_config.param_offload=True", "algorithm.adv_estimator=gae"]
    [loaded] = load([*REQUIRED, *settings], complete=False)
    assert list(find_conflicts(loaded.config)) == []


def test_a_name_is_registered_once() -> None:
    before = list_train_engines()
    register_train_engine(get_train_engine("fsdp2"))
    assert list_train_engines() == before
    with pytest.raises(ValueError, match="'fsdp2' is registered already"):
        register_train_engine(TrainEngineSpec("fsdp2", "other:Engine", "other:Settings"))
    with pytest.raises(ValueError, match="teleportation are not capabilities"):
        TrainEngineSpec("mine", "mine:Engine", "mine:Settings", frozenset({"teleportation"}))  # type: ignore[arg-type]
