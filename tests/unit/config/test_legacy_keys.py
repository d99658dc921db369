"""Keys of other launch scripts: accepted with a reason, renamed, passed on, or refused by the name of a feature."""

from __future__ import annotations

from pathlib import Path

import pytest
from key_answers import find_answer

from verl.config.load import SFT, TRAIN, RunType, load, load_dict, load_sft
from verl.config.paths import find_setting, format_value, get_value
from verl.config.render import describe
from verl.config.schema import collect_settings
from verl.errors import ConfigError

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[3] / "docs" / "migration.md"
ACCEPTANCE = Path(__file__).parents[2] / "acceptance" / "packaging"


def problems_of(*settings: str, sft: bool = False) -> list[str]:
    try:
        (load_sft if sft else load)(settings, complete=False)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("actor_rollout_ref.model.use_remove_padding=True", "always on here"),
        ("trainer.balance_batch=False", "always on here"),
        ("+actor_rollout_ref.rollout.layered_summon=True", "gathered one at a time"),
        ("+actor_rollout_ref.rollout.multi_stage_wake_up=True", "for the weights first"),
        ("critic.ulysses_sequence_parallel_size=2", "as the actor does"),
        ("critic.fsdp.qat.mode=w4a16", "not supported yet"),
        ("actor_rollout_ref.rollout.agent.num_workers=8", "episode workers are as many as episodes and cores ask for"),
        ("transfer_queue.enable=True", "object store"),
        ("actor_rollout_ref.ref.fsdp_config.fsdp_size=2", "sharded as the actor is"),
        ("global_profiler.relocate_results=True", "in the folder of the run"),
        ("actor_rollout_ref.ref.profiler.enable=True", "runs in the train workers"),
        ("actor_rollout_ref.actor=dp_actor", "no config groups"),
        ("~trainer.balance_batch", "not a setting here"),
    ],
)
def test_a_key_that_changes_no_results_is_accepted_with_its_reason(setting: str, reason: str) -> None:
    (loaded,) = load([setting], complete=False)
    assert [hint for hint in loaded.hints if "has no effect" in hint and reason in hint], loaded.hints


@pytest.mark.parametrize(
    ("setting", "feature"),
    [
        ("++actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2", "interleaved pipeline stages"),
        ("actor_rollout_ref.actor.megatron.override_ddp_config.bucket_size=1", "other settings of Megatron-Core"),
        ("actor_rollout_ref.actor=mlite_actor", "Megatron-Core with another engine"),
        ("actor_rollout_ref.actor.strategy=veomni", "VeOmni"),
        ("trainer.device=npu", "Ascend NPUs"),
        ("data.image_key=images", "images and videos"),
        ("actor_rollout_ref.rollout.profiler.enable=True", "profiling of engines"),
        ("data.gen_batch_size=64", "generation in batches of another size than data.train_batch_size"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=4", "micro-batch sizes of all GPUs together"),
        ("actor_rollout_ref.actor.fsdp_config.qat.enable=True", "quantization-aware training"),
        ("reward_model.rollout.temperature=0.5", "generative reward models"),
    ],
)
def test_a_key_that_needs_more_is_refused_by_the_name_of_the_feature(setting: str, feature: str) -> None:
    (problem,) = problems_of(setting)
    assert f"requires {feature}, which is not supported yet" in problem


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("rollout.prompt_length=99", "data.max_prompt_length", 99),
        ("actor_rollout_ref.actor.tau_pos=2.0", "actor_rollout_ref.actor.policy_loss.tau_pos", 2.0),
        ("sandbox_fusion.memory_limit_mb=512", "reward.sandbox.memory_mb", 512),
        ("sandbox_fusion.memory_limit_mb=null", "reward.sandbox.memory_mb", 1024),
        ("critic.fsdp.param_offload=True", "critic.fsdp_config.param_offload", True),
        ("+actor_rollout_ref.model.lora.merge=True", "actor_rollout_ref.rollout.lora_transport", "merged"),
        ("actor_rollout_ref.actor.optim.optimizer=AdamW", "actor_rollout_ref.actor.optim.name", "adamw"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=-1", "actor_rollout_ref.actor.optim.lr_warmup_steps", None),
        ("actor_rollout_ref.actor.optim.clip_grad=0.5", "actor_rollout_ref.actor.grad_clip", 0.5),
        ("trainer.logger=[console,file]", "trainer.logger", ["console", "jsonl"]),
        ("trainer.max_actor_ckpt_to_keep=3", "trainer.max_ckpts_to_keep", 3),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len=7", "reward.overlong_buffer.len", 7),
    ],
)
def test_a_key_of_another_name_sets_the_setting(setting: str, key: str, value: object) -> None:
    (loaded,) = load([setting], complete=False)
    assert get_value(loaded.config, key) == value


def test_a_null_that_means_not_given_does_not_replace_a_value() -> None:
    key = "actor_rollout_ref.actor.optim.lr_scheduler_type"
    (loaded,) = load([f"{key}=cosine", "actor_rollout_ref.actor.optim.warmup_style=null"], complete=False)
    assert get_value(loaded.config, key) == "cosine"
    tree = {"actor_rollout_ref": {"actor": {"optim": {"lr_scheduler_type": "cosine", "warmup_style": None}}}}
    assert get_value(load_dict(tree, complete=False).config, key) == "cosine"


def test_engine_arguments_of_the_rollout_section_are_passed_on_to_vllm() -> None:
    (loaded,) = load(["actor_rollout_ref.rollout.enable_chunked_prefill=False"], complete=False)
    assert loaded.config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"enable_chunked_prefill": False}


def test_a_longer_context_than_the_models_is_passed_on_to_vllm() -> None:
    (loaded,) = load(["+actor_rollout_ref.model.override_config.max_position_embeddings=32768"], complete=False)
    overrides = {"hf_overrides": {"max_position_embeddings": 32768}}
    assert loaded.config.actor_rollout_ref.rollout.engine_kwargs.vllm == overrides
    assert any("max_position_embeddings is an alias of" in hint for hint in loaded.hints)
    (problem,) = problems_of("+actor_rollout_ref.model.override_config.attn_implementation=eager")
    assert "changes of a model's configuration" in problem


def test_arguments_of_an_engine_that_is_not_used_have_no_effect() -> None:
    (loaded,) = load(["+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=triton"], complete=False)
    assert any("engine_kwargs.sglang" in hint and "has no effect" in hint for hint in loaded.hints)


def test_a_member_of_a_config_group_does_not_replace_its_section() -> None:
    (loaded,) = load_sft(["optim.lr=3e-4", "optim=fsdp", "model=hf_model"], complete=False)
    assert loaded.config.optim.lr == 3e-4


def test_supervised_runs_have_their_own_answers() -> None:
    settings = [
        "data.use_dynamic_bsz=True",
        "engine.model_dtype=fp32",
        "optim.init_lr_ratio=0.1",
        "data.pad_mode=right",
    ]
    (loaded,) = load_sft([*settings, "optim.lr_warmup_steps=10"], complete=False)
    assert loaded.config.data.packing
    assert loaded.config.optim.init_lr_ratio == 0.1
    (problem,) = problems_of("engine.pp_size=2", sft=True)
    assert "requires pipeline parallelism" in problem


def test_yaml_of_another_setup_is_read_too() -> None:
    loaded = load_dict({"trainer": {"balance_batch": True, "_target_": "some.Class"}}, complete=False)
    assert [hint for hint in loaded.hints if "balance_batch" in hint]


def test_verl_config_explains_such_keys() -> None:
    assert "always on: tokens are balanced" in describe("trainer.balance_batch")
    assert "not supported yet: images and videos" in describe("data.image_key")


def test_a_typing_mistake_is_still_unknown() -> None:
    (problem,) = problems_of("trainer.balanc_batch=True")
    assert "is not a setting" in problem


@pytest.mark.parametrize("run_type", [TRAIN, SFT], ids=lambda run_type: run_type.command)
def test_no_rule_hides_a_setting_or_an_alias(run_type: RunType) -> None:
    settings = collect_settings(run_type.root)
    leaves = {key for key, setting in settings.items() if setting.section is None}
    assert not run_type.legacy.rules.keys() & leaves
    for key in run_type.legacy.rules:
        path = tuple(key.split("."))
        assert run_type.legacy.resolve_alias(path) == path, f"{key} is never looked up: it is an alias"
    assert set(run_type.legacy.refused_values) | set(run_type.legacy.default_choices) <= set(settings)


@pytest.mark.parametrize("run_type", [TRAIN, SFT], ids=lambda run_type: run_type.command)
def test_defaults_that_differ_are_settings_whose_default_differs(run_type: RunType) -> None:
    assert run_type.legacy.defaults
    for key, other in run_type.legacy.defaults.items():
        setting = find_setting(tuple(key.split(".")), run_type.root)
        assert setting is not None
        assert str(setting.default).lower() != other.value
        assert find_answer(key, run_type).kind == "setting"
        row = f"| `{key}` | {run_type.command} | `{other.value}` | `{format_value(setting.default)}` | {other.reason}"
        assert row in PAGE.read_text(encoding="utf-8")


def test_the_page_of_keys_is_current_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ACCEPTANCE)
    import scripts

    assert scripts.PAGE.read_text(encoding="utf-8") == scripts.render_page(scripts.read_scripts()), (
        "run `make show-scripts ARGS=--write`"
    )
    assert "UNKNOWN" not in scripts.PAGE.read_text(encoding="utf-8")
