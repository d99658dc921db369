"""Settings against each other."""

from __future__ import annotations

import importlib
import sys

import pytest
import yaml

from verl.config.features import get_importance_weights
from verl.config.load import load, load_dict
from verl.config.render import render
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.rollout.vllm import checks

pytestmark = pytest.mark.unit

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS = f"{A}.policy_loss.loss_mode"
GAE = "algorithm.adv_estimator=gae"
COSINE = f"{A}.optim.lr_scheduler_type=cosine"
ADAPTER = [f"{A}.peft.lora_rank=8", f"{R}.lora_transport=adapter"]
TEACHER = ["distillation.enable=true", "distillation.mode=loss", "distillation.teacher.path=teacher"]
MASK = f"{R}.keep_sampling_mask=true"
MODEL = ["reward.reward_model.enable=true", "reward.reward_model.model_path=rm"]


def hints(*overrides: str) -> list[str]:
    [loaded] = load([f"{R}.n=8", *overrides], complete=False)
    return list(loaded.hints)


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load([f"{R}.n=8", *overrides], complete=False)
    [text] = raised.value.problems
    return text


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"{R}.max_model_len=1000"], f"set {R}.max_model_len=1024"),
        ([f"{R}.max_num_batched_tokens=100", f"{R}.max_num_seqs=101"], f"set {R}.max_num_seqs=100"),
        ([f"{R}.num_engines=9", "trainer.device=cuda"], f"set {R}.num_engines=8"),
        ([f"{R}.temperature=0"], f"set {R}.temperature=1.0"),
        ([f"{A}.fsdp_config.fsdp_size=3"], f"set {A}.fsdp_config.fsdp_size=2"),
        ([GAE, "critic.fsdp_config.fsdp_size=0"], "set critic.fsdp_config.fsdp_size=1"),
        ([f"{A}.fsdp_config.expert_parallel_size=3"], f"set {A}.fsdp_config.expert_parallel_size=2"),
        (
            [f"{A}.fsdp_config.expert_parallel_size=8", f"{A}.fsdp_config.fsdp_size=4"],
            f"set {A}.fsdp_config.expert_parallel_size=4",
        ),
        (
            [f"{A}.fsdp_config.expert_parallel_size=2", f"{A}.optim.name=adamw_8bit"],
            f"set {A}.fsdp_config.expert_parallel_size=1",
        ),
        ([f"{A}.ulysses_sequence_parallel_size=3"], f"set {A}.ulysses_sequence_parallel_size=2"),
        (
            [f"{A}.ulysses_sequence_parallel_size=2", *TEACHER, "distillation.teacher.use_own_chat_template=true"],
            f"set {A}.ulysses_sequence_parallel_size=1",
        ),
        (
            [f"{A}.fsdp_config.{each}" for each in ("fsdp_size=4", "model_dtype=bfloat16", "stochastic_rounding=true")],
            f"set {A}.fsdp_config.fsdp_size=-1",
        ),
        ([f"{A}.router_replay.mode=R3", f"{R}.name=hf"], f"set {A}.router_replay.mode=R2"),
        (
            [f"{A}.router_replay.mode=R3", f"{R}.engine_kwargs.vllm.enable_prefix_caching=false"],
            f"set {A}.router_replay.mode=R2",
        ),
        (
            [f"{A}.router_replay.mode=R2", "algorithm.rollout_correction.bypass_mode=true"],
            f"set {A}.router_replay.mode=R3",
        ),
        (
            [f"{A}.router_aux_loss_coef=0.01", "algorithm.rollout_correction.bypass_mode=true"],
            f"set {A}.router_replay.mode=R3",
        ),
        (
            ["actor_rollout_ref.model.fp32_lm_head=true", f"{R}.engine_kwargs.vllm.hf_overrides={{a:1}}"],
            "set actor_rollout_ref.model.fp32_lm_head=false",
        ),
        ([f"{R}.val_kwargs.do_sample=true"], f"set {R}.val_kwargs.temperature=1.0"),
        ([f"{R}.weight_transport=nccl", "trainer.device=cpu"], f"set {R}.weight_transport=host"),
        ([f"{R}.weight_transport=ipc", f"{R}.name=hf"], f"set {R}.weight_transport=host"),
        ([f"{A}.peft.peft_type=lora"], f"set {A}.peft.lora_rank=16"),
        ([GAE, "critic.peft.peft_type=lora"], "set critic.peft.lora_rank=16"),
        ([f"{A}.peft.lora_rank=8", f"{A}.peft.target_modules=[]"], f"set {A}.peft.target_modules=all-linear"),
        ([*ADAPTER, f"{R}.name=hf"], f"set {R}.lora_transport=merged"),
        ([*ADAPTER, f"{R}.weight_transport=ipc", "trainer.device=cuda"], f"set {R}.lora_transport=merged"),
        ([*ADAPTER, f"{A}.peft.lora_rank=1024"], f"set {R}.lora_transport=merged"),
        ([f"{A}.optim.lr_warmup_steps=11", "trainer.total_training_steps=10"], f"set {A}.optim.lr_warmup_steps=10"),
        (
            [f"{A}.optim.lr_warmup_steps=10", "trainer.total_training_steps=10", f"{A}.ppo_epochs=2", COSINE],
            f"set {A}.optim.lr_warmup_steps=9",
        ),
        ([f"{A}.optim.lr_warmup_steps_ratio=1", COSINE], f"set {A}.optim.lr_warmup_steps_ratio=0.1"),
        (
            [f"{A}.optim.lr_warmup_steps_ratio=0.9", "trainer.total_training_steps=1", COSINE],
            f"set {A}.optim.lr_warmup_steps_ratio=0.1",
        ),
        (
            [GAE, "critic.optim.lr_warmup_steps=11", "trainer.total_training_steps=10"],
            "set critic.optim.lr_warmup_steps=10",
        ),
        (
            [GAE, f"{A}.optim.lr_warmup_steps=10", "trainer.critic_warmup=1", "trainer.total_training_steps=10"],
            f"set {A}.optim.lr_warmup_steps=9",
        ),
        ([GAE, "trainer.critic_warmup=10", "trainer.total_training_steps=10"], "set trainer.critic_warmup=1"),
        ([f"{R}.n=1", f"{LOSS}=dpo"], f"set {R}.n=8"),
        ([f"{R}.n=1", f"{LOSS}=sppo"], f"set {R}.n=8"),
        ([f"{R}.n=1", "algorithm.adv_estimator=grpo_passk"], f"set {R}.n=8"),
        ([f"{R}.n=1", "algorithm.filter_groups.enable=true", f"{LOSS}=dpo"], f"set {R}.n=8"),
        ([f"{LOSS}=clip_cov", f"{A}.policy_loss.clip_cov_lb=5"], f"set {A}.policy_loss.clip_cov_lb=1.0"),
        ([f"{A}.clip_ratio_low=10"], f"set {A}.clip_ratio_low=0.2"),
        ([f"{R}.n=1", "critic.optim.lr=1e-4"], f"set {GAE}"),
        (
            ["algorithm.rollout_correction.rollout_rs=geometric"],
            "set algorithm.rollout_correction.rollout_rs_threshold=1.001",
        ),
        (["reward.overlong_buffer.enable=true"], "set reward.overlong_buffer.len=102"),
        (
            ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=513"],
            "set reward.overlong_buffer.len=102",
        ),
        (["reward.prime.enable=true"], "set algorithm.adv_estimator=rloo"),
        (
            ["reward.prime.enable=true", "algorithm.adv_estimator=rloo", f"{LOSS}=dpo"],
            f"set {A}.policy_loss.loss_mode=vanilla",
        ),
        (["reward.reward_model.enable=true"], "set reward.reward_model.model_path=my-org/reward-model"),
        (["trainer.test_freq=5"], "set data.val_files=test.parquet"),
        (["data.train_files=[a.parquet,b.parquet]", "data.train_weights=[1]"], "set data.train_weights=[1,1]"),
        (["data.train_files=a.parquet", "data.train_weights=[3,1]"], "set data.train_weights=[1]"),
        (["data.sampler=mine:order", "data.curriculum_key=level"], "set data.curriculum_key=null"),
        (["data.sampler=mine:order", "data.train_weights=[1]"], "set data.train_weights=null"),
        (["data.sampler=mine:order", "data.streaming=true"], "set data.streaming=false"),
        (["data.sampler=replay", "data.streaming=true"], "set data.streaming=false"),
        (["data.curriculum_key=level", "data.streaming=true"], "set data.streaming=false"),
        (
            ["trainer.resume_mode=path"],
            "set trainer.resume_from_path=checkpoints/verl/default/global_step_100",
        ),
        (
            [
                f"{A}.optim.name=muon",
                f"{A}.fsdp_config.model_dtype=bfloat16",
                f"{A}.fsdp_config.stochastic_rounding=true",
            ],
            f"{A}.optim.name=adamw",
        ),
        (
            ["algorithm.adv_estimator=optimal_token_baseline", "algorithm.rollout_correction.bypass_mode=true"],
            "set algorithm.rollout_correction.bypass_mode=false",
        ),
        ([MASK], f"set {R}.top_k=64"),
        ([MASK, f"{R}.top_p=0.9"], f"set {R}.top_k=64"),
        ([MASK, f"{R}.top_k=257"], f"set {R}.top_k=64"),
        ([MASK, f"{R}.top_k=50", *TEACHER], f"set {R}.keep_sampling_mask=false"),
        ([MASK, f"{R}.top_k=50", f"+{R}.engine_kwargs.vllm.max_logprobs=5"], f"set {R}.keep_sampling_mask=false"),
        (
            [MASK, f"{R}.top_k=50", f"+{R}.engine_kwargs.vllm.speculative_config={{}}"],
            f"set {R}.keep_sampling_mask=false",
        ),
    ],
)
def test_conflicts_are_refused_and_the_suggested_fix_works(overrides: list[str], says: str) -> None:
    text = problem(*overrides)
    assert says in text
    hints(*overrides, says.removeprefix("set "))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"{R}.n=1"], "leaves algorithm.adv_estimator=grpo no group to compare with"),
        ([f"{R}.n=1", "algorithm.adv_estimator=opo"], "leaves algorithm.adv_estimator=opo no group"),
        (
            [f"{R}.n=1", "algorithm.adv_estimator=optimal_token_baseline"],
            "leaves algorithm.adv_estimator=optimal_token_baseline no group",
        ),
        ([f"{A}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"], "counts twice"),
        ([f"{A}.use_kl_loss=true", f"{A}.kl_loss_type=kl"], f"set {A}.kl_loss_type=low_var_kl"),
        ([f"{A}.fsdp_config.model_dtype=bfloat16"], f"set {A}.fsdp_config.model_dtype=float32"),
        ([GAE, "critic.fsdp_config.model_dtype=bfloat16"], "or critic.fsdp_config.stochastic_rounding=true"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0"], "set algorithm.use_kl_in_reward=false"),
        ([GAE, "critic.ppo_mini_batch_size=2000"], "set critic.ppo_mini_batch_size=1024"),
        ([GAE, "critic.ppo_mini_batch_size=1000"], "the last mini-batch of a step has 24 prompts"),
        (
            [GAE, "critic.ppo_mini_batch_size=1", "trainer.n_gpus_per_node=16"],
            "critic.ppo_mini_batch_size: a mini-batch",
        ),
        (
            [GAE, "critic.use_dynamic_bsz=true", "critic.ppo_max_token_len_per_gpu=900"],
            "set critic.ppo_max_token_len_per_gpu=1024",
        ),
        ([f"{R}.temperature=1.7"], "mostly noise"),
        ([f"{R}.val_kwargs.n=4"], "4 greedy responses are all equal"),
        (["data.train_batch_size=64"], "so each step is one mini-batch"),
        (["data.train_batch_size=1000"], "the last mini-batch of a step has 232 prompts"),
        ([f"{A}.ppo_mini_batch_size=1", "trainer.n_gpus_per_node=16"], "idle"),
        ([f"{A}.use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=1000"], "less than the longest sequence"),
        ([f"{A}.clip_ratio_low=0.3"], "is above clip_ratio_high=0.2"),
        ([f"{R}.top_p=0.9"], f"set {R}.top_p=1.0"),
        ([f"{R}.top_k=50"], f"set {R}.top_k=-1"),
        ([f"{A}.use_torch_compile=true", "trainer.device=cpu"], "on CPU (trainer.device) nothing is compiled"),
        ([f"{A}.use_prefix_grouper=true", f"{R}.n=1"], f"{R}.n=1: every prompt has one response"),
        ([f"{A}.use_kl_loss=true", f"{A}.kl_loss_coef=0"], "computed but not used"),
    ],
)
def test_probable_mistakes_are_hinted_at(overrides: list[str], says: str) -> None:
    assert any(says in hint for hint in hints(*overrides))
    assert not any(says in hint for hint in hints())


@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_truncated_sampling_is_no_mistake_with_the_mask(engine: str) -> None:
    assert hints(MASK, f"{R}.name={engine}", f"{R}.top_k=256", f"{R}.top_p=0.9") == []


def test_importance_weights_of_old_responses_are_exact_with_the_mask() -> None:
    settings = [f"{R}.top_k=20", "trainer.max_staleness=1"]
    [without], [config] = (load([f"{R}.n=8", *settings, *more], complete=False) for more in ([], [MASK]))
    assert [get_importance_weights(each.config) for each in (without, config)] == [None, "token"]
    assert any(f"or {MASK}" in hint for hint in without.hints)
    assert not any("rollout_is" in hint for hint in config.hints)


@pytest.mark.parametrize(
    ("ignored", "switches_on"),
    [
        (f"{A}.kl_loss_coef=0.1", [f"{A}.use_kl_loss=true"]),
        (f"{A}.kl_loss_type=k1", [f"{A}.use_kl_loss=true"]),
        (f"{A}.loss_scale_factor=100.0", [f"{A}.loss_agg_mode=seq-mean-token-sum-norm"]),
        (f"{A}.peft.lora_alpha=32", [f"{A}.peft.lora_rank=8"]),
        (f"{A}.peft.target_modules=q_proj", [f"{A}.peft.lora_rank=8"]),
        (f"{R}.lora_transport=merged", [f"{A}.peft.lora_rank=8"]),
        (f"{A}.optim.min_lr_ratio=0.1", [f"{A}.optim.lr_scheduler_type=cosine"]),
        ("reward.custom_reward_function.name=f", ["reward.custom_reward_function.path=r.py"]),
        ("reward.reward_model.model_path=rm", ["reward.reward_model.enable=true"]),
        ("reward.reward_model.weight=0.5", [*MODEL, "reward.custom_reward_function.path=r.py"]),
        ("reward.reward_model.weight=0.5", [*MODEL, "reward.functions=[{path: r.py}]"]),
        ("data.val_max_samples=10", ["data.val_files=v.parquet"]),
        ("trainer.resume_from_path=x/global_step_5", ["trainer.resume_mode=path"]),
    ],
)
def test_an_ignored_setting_is_reported_until_its_switch_is_set(ignored: str, switches_on: list[str]) -> None:
    def is_reported(*overrides: str) -> bool:
        return any(hint.startswith(f"{ignored} has no effect") for hint in hints(ignored, *overrides))

    assert is_reported()
    assert not is_reported(*switches_on)


@pytest.mark.parametrize("ignored", ["trainer.max_ckpts_to_keep=2", "trainer.save_hf=true"])
def test_settings_of_checkpoints_are_reported_if_nothing_is_saved(ignored: str) -> None:
    assert any(hint.startswith(f"{ignored} has no effect") for hint in hints(ignored, "trainer.save_freq=-1"))
    assert not any(hint.startswith(ignored) for hint in hints(ignored))


@pytest.mark.parametrize(
    ("ignored", "by"),
    [
        (f"{A}.ppo_micro_batch_size_per_gpu=2", [f"{A}.use_dynamic_bsz=true"]),
        (f"{A}.ppo_max_token_len_per_gpu=9000", [f"{A}.use_dynamic_bsz=false"]),
        (f"{A}.ppo_max_token_len_per_gpu=9000", ["trainer.device=cpu"]),
        (f"{A}.ppo_max_token_len_per_gpu=9000", [f"{A}.ppo_micro_batch_size_per_gpu=2"]),
        (f"{A}.clip_ratio=0.1", [f"{A}.clip_ratio_low=0.2", f"{A}.clip_ratio_high=0.3"]),
        (f"{A}.optim.lr_warmup_steps_ratio=0.1", [f"{A}.optim.lr_warmup_steps=4"]),
        (f"{R}.max_num_seqs=64", [f"{R}.name=hf"]),
        (f"{R}.max_model_len=2000", [f"{R}.name=hf"]),
        (f"{R}.load_format=auto", [f"{R}.name=hf"]),
        (f"{R}.cpu_cache_gib=2", [f"{R}.name=hf"]),
        (f"{R}.cpu_cache_gib=2", ["trainer.device=cuda"]),
        (f"{R}.gpu_memory_utilization=0.4", ["trainer.device=cpu"]),
        (f"{A}.fsdp_config.param_offload=true", ["trainer.device=cpu"]),
        (f"{A}.fsdp_config.offload_policy=true", ["trainer.device=cpu"]),
        (f"{A}.fsdp_config.use_torch_compile=true", ["trainer.device=cpu"]),
        (f"{A}.fsdp_config.param_offload=true", [f"{A}.fsdp_config.offload_policy=true"]),
        (f"{A}.fsdp_config.optimizer_offload=true", [f"{A}.fsdp_config.offload_policy=true"]),
        (f"{R}.val_kwargs.temperature=0.9", [f"{R}.val_kwargs.do_sample=false"]),
        ("data.truncation=left", ["data.filter_overlong_prompts=true"]),
        ("data.seed=4", ["data.shuffle=false"]),
        ("reward.memory_mb=2000", MODEL),
        ("reward.reward_manager.name=prime", MODEL),
        ("trainer.total_epochs=3", ["trainer.total_training_steps=10"]),
    ],
)
def test_a_setting_that_another_one_overrides_is_reported(ignored: str, by: list[str]) -> None:
    def is_reported(*overrides: str) -> bool:
        return any(hint.startswith(f"{ignored} has no effect") for hint in hints(ignored, *overrides))

    assert not is_reported()
    assert is_reported(*by)


@pytest.mark.parametrize("ignored", [f"{R}.val_kwargs.top_p=0.9", f"{R}.val_kwargs.top_k=5"])
def test_what_narrows_the_sampling_of_validation_needs_a_temperature(ignored: str) -> None:
    assert any(hint.startswith(f"{ignored} has no effect") for hint in hints(ignored))
    assert not any("has no effect" in hint for hint in hints(ignored, f"{R}.val_kwargs.temperature=0.7"))


def test_log_probs_cannot_be_turned_off_and_that_is_reported() -> None:
    ignored = f"{R}.calculate_log_probs=false"
    assert any(hint.startswith(f"{ignored} has no effect") for hint in hints(ignored))
    assert hints(f"{R}.calculate_log_probs=true") == []


def test_the_micro_batch_of_the_reference_has_an_effect_if_there_is_one() -> None:
    key = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4"
    assert any(hint.startswith(f"{key} has no effect") for hint in hints(key))
    assert hints(key, f"{A}.use_kl_loss=true") == []


@pytest.mark.parametrize(
    "reward", [["reward.custom_reward_function.path=r.py"], ["reward.functions=[{path: r.py}]"], MODEL]
)
def test_a_reward_beside_an_environment_is_hinted_at(reward: list[str]) -> None:
    environment = f"{R}.multi_turn.environment=games.py:Game"
    [hint] = hints(*reward, f"{R}.multi_turn.enable=true", environment)
    assert "has no effect on episodes of" in hint
    assert hint.startswith(reward[0].partition("=")[0])
    assert hints(*reward, f"{R}.multi_turn.enable=true") == []


def test_the_dapo_reward_manager_is_naive_and_a_hint_names_the_settings_of_dapo() -> None:
    [hint] = hints("reward.reward_manager.name=dapo")
    assert "reward.overlong_buffer.enable=true" in hint
    assert "algorithm.filter_groups.enable=true" in hint


@pytest.mark.parametrize(
    ("given_default", "reason"),
    [
        ("algorithm.kl_ctrl.kl_coef=0.001", "algorithm.use_kl_in_reward=false"),
        (f"{A}.kl_loss_type=low_var_kl", f"{A}.use_kl_loss=false"),
        (f"{A}.peft.lora_alpha=16", "means no adapter"),
        ("critic.optim.lr=1e-5", "trains a critic"),
        ("reward.custom_reward_function.name=compute_score", "path is not given"),
    ],
)
def test_a_setting_that_is_given_with_its_default_and_has_no_effect_is_reported(
    given_default: str, reason: str
) -> None:
    [hint] = hints(given_default)
    assert "has no effect" in hint
    assert reason in hint


@pytest.mark.parametrize(
    "off",
    [
        f"{A}.fsdp_config.param_offload=false",
        "trainer.ref_update_freq=-1",
        "trainer.resume_from_path=null",
        "reward.overlong_buffer.len=0",
        "reward.prime.model_path=null",
    ],
)
def test_what_is_turned_off_where_it_has_no_effect_is_not_reported(off: str) -> None:
    assert hints(off, "trainer.device=cpu") == []


def test_a_file_that_lists_all_settings_gets_no_hints_about_their_defaults() -> None:
    assert load_dict(yaml.safe_load(render(Config())), [f"{R}.n=8"], complete=False).hints == ()
    listed = load_dict(yaml.safe_load(render(Config())), [f"{R}.n=8", "algorithm.kl_ctrl.kl_coef=0.01"], complete=False)
    assert [hint.partition("=")[0] for hint in listed.hints] == ["algorithm.kl_ctrl.kl_coef"]


VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("tensor_parallel_size=2", f"has its own setting; set {R}.tensor_model_parallel_size instead"),
        ("seed=3", "has its own setting; set trainer.seed instead"),
        ("max_model_len=10", f"has its own setting; set {R}.max_model_len instead"),
        ("trust_remote_code=true", "has its own setting; set actor_rollout_ref.model.trust_remote_code instead"),
        ("worker_extension_cls=my.Worker", "is set by verl and cannot be changed; remove it"),
        ("block_sise=16", f"is not an engine argument of the installed vLLM; did you mean {VLLM}.block_size?"),
        ("max_num_seq=16", f"is not an engine argument of the installed vLLM; did you mean {R}.max_num_seqs?"),
        ("quixotic=1", "is not an engine argument of the installed vLLM; remove it"),
    ],
)
def test_engine_arguments_must_exist_and_not_duplicate_a_setting(
    argument: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = frozenset({"block_size", "max_num_seqs", "enable_prefix_caching"})
    monkeypatch.setattr(checks, "list_vllm_arguments", lambda: names)
    assert problem(f"+{VLLM}.{argument}") == f"{VLLM}.{argument.partition('=')[0]}: {says}"
    assert hints(f"+{VLLM}.enable_prefix_caching=false") == []


def test_engine_arguments_are_not_checked_by_name_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "list_vllm_arguments", frozenset)
    assert hints(f"+{VLLM}.quixotic=1") == []


def test_an_adaptive_kl_that_would_turn_negative_is_refused() -> None:
    settings = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "data.train_batch_size=1024"]
    with pytest.raises(ConfigError, match=r"kl_ctrl\.horizon: 1000 must be above.*set algorithm\.kl_ctrl\.horizon="):
        load([*settings, "algorithm.kl_ctrl.horizon=1000", f"{R}.n=8"], complete=False)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{A}.optim.lr_warmup_steps=10", "trainer.total_training_steps=10"],
        [f"{A}.optim.lr_warmup_steps=9", "trainer.total_training_steps=10", COSINE],
        [f"{A}.optim.lr_warmup_steps=4000"],  # the data says how many steps
        [f"{A}.optim.lr_warmup_steps_ratio=1", "trainer.total_training_steps=10"],
        [f"{A}.optim.lr_warmup_steps_ratio=0.9", COSINE],
    ],
)
def test_a_warm_up_that_ends_within_the_run_is_fine(overrides: list[str]) -> None:
    assert hints(*overrides) == []


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{R}.n=1", GAE],
        [f"{R}.n=1", "algorithm.adv_estimator=remax"],
        [f"{R}.n=2", f"{LOSS}=dpo"],
        [f"{A}.peft.peft_type=lora", f"{A}.peft.lora_rank=8", f"{R}.name=hf"],
        [*MODEL, "data.return_raw_input_ids=true", "reward.reward_model.replicas=2"],
        [*MODEL, "reward.custom_reward_function.path=r.py", "reward.memory_mb=2000"],
        ["reward.prime.enable=true", "algorithm.adv_estimator=rloo"],
        ["reward.prime.enable=true", "algorithm.adv_estimator=my.module:estimator"],
        ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=512"],
        [GAE, "trainer.critic_warmup=9", "trainer.total_training_steps=10"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k3", "trainer.ref_update_freq=5"],
        ["algorithm.rollout_correction.rollout_rs=geometric", "algorithm.rollout_correction.rollout_rs_threshold=1.01"],
        [f"{A}.clip_ratio_low=0.2", f"{A}.clip_ratio_high=0.28", "algorithm.filter_groups.enable=true"],
    ],
)
def test_algorithms_that_fit_together_load_without_hints(overrides: list[str]) -> None:
    assert hints(*overrides) == []


def test_reinforce_in_bypass_mode_does_not_replace_a_chosen_loss() -> None:
    bypass = ["algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.loss_type=reinforce"]
    assert "reinforce replaces the policy loss" in problem(*bypass, f"{LOSS}=gspo")
    assert hints(*bypass, f"{LOSS}=gpg") == []


@pytest.mark.parametrize("given", ["0.5_5", "1_5", "0.5_2.0", "0.001_5"])
def test_the_numbers_of_a_range_are_not_joined(given: str) -> None:
    key = "algorithm.rollout_correction.rollout_is_threshold"
    [loaded] = load(["algorithm.rollout_correction.rollout_is=token", f"{key}={given}"], complete=False)
    assert loaded.config.algorithm.rollout_correction.rollout_is_threshold == given


@pytest.mark.parametrize(
    "override",
    [
        "rollout_rs_threshold=1.0",
        "rollout_rs_threshold_lower=1.0",
        "rollout_rs_threshold=1.2_1.6",
        "rollout_rs_threshold=1.6_0.6",
        "rollout_rs_threshold=0.5_1.2_1.6",
        "rollout_rs_threshold=1.2,1.3",
    ],
)
def test_the_bounds_of_a_rejection_lie_on_both_sides_of_one(override: str) -> None:
    assert "algorithm.rollout_correction.rollout_rs_threshold" in problem(
        "algorithm.rollout_correction.rollout_rs=token", f"algorithm.rollout_correction.{override}"
    )


def test_bounds_that_nothing_uses_are_not_compared() -> None:
    [hint] = hints(f"{LOSS}=gpg", f"{A}.clip_ratio_low=0.3")
    assert hint.startswith(f"{A}.clip_ratio_low=0.3 has no effect: only {LOSS}=vanilla or gspo or ")


def test_determinism_and_compilation_give_no_hints() -> None:
    assert hints("trainer.deterministic=true") == []
    assert hints(f"{A}.use_torch_compile=false") == []
    assert hints(f"{A}.use_torch_compile=true", "trainer.device=cuda") == []


def test_an_adapter_without_peft_is_a_problem_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "peft", raising=False)  # another test may have imported it
    importlib.invalidate_caches()
    given_ = {"data": {"train_files": "a.parquet"}, "actor_rollout_ref": {"model": {"path": "tiny"}}}
    with pytest.raises(ConfigError, match=r'peft.lora_rank: 8 requires the package PEFT; pip install -e "\.\[lora\]"'):
        load_dict(given_, [f"{A}.peft.lora_rank=8"])


def test_vllm_that_is_missing_or_too_old_is_a_problem_of_a_run(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    importlib.invalidate_caches()
    given_ = {"data": {"train_files": "a.parquet"}, "actor_rollout_ref": {"model": {"path": "tiny"}}}
    with pytest.raises(ConfigError, match=rf"{R}.name: vllm requires a package; pip install --no-deps -r requ"):
        load_dict(given_)
    load_dict(given_, [f"{R}.name=hf"])
    (tmp_path / "vllm.py").touch()
    (tmp_path / "vllm-0.5.4.dist-info").mkdir()
    (tmp_path / "vllm-0.5.4.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.5.4+cu121\n")
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=rf"{R}.name: vllm 0.5.4\+cu121 is too old: 0.32 or newer is required"):
        load_dict(given_)


def test_a_tracker_whose_package_is_not_installed_is_a_problem_of_a_run(monkeypatch, tmp_path) -> None:
    (tmp_path / "wandb").mkdir()  # a folder that wandb left is no package
    for package in ("tensorboard", "vllm"):
        (tmp_path / f"{package}.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    given_ = {"data": {"train_files": "a.parquet"}, "actor_rollout_ref": {"model": {"path": "tiny"}}}
    given_ |= {"trainer": {"logger": ["tensorboard", "wandb", "jsonl"]}}
    with pytest.raises(ConfigError) as raised:
        load_dict(given_)
    [text] = raised.value.problems
    assert text == (
        'trainer.logger: wandb requires a package; pip install -e ".[wandb]" in the verl checkout, or set '
        "trainer.logger=[tensorboard,jsonl]"
    )
    load_dict(given_, complete=False)


def test_the_kl_weight_in_the_reward_has_no_effect_without_it() -> None:
    assert any("algorithm.use_kl_in_reward=false" in hint for hint in hints("algorithm.kl_ctrl.kl_coef=0.05"))


def test_ray_arguments_are_those_given() -> None:
    [loaded] = load(["ray_kwargs.ray_init.num_cpus=4"], complete=False)
    assert loaded.config.ray_kwargs.ray_init.arguments() == {"num_cpus": 4}


@pytest.mark.parametrize("asked", [["trainer.save_hf=true"], []])
def test_saving_hf_models_requires_the_weights_in_the_checkpoint(asked: list[str]) -> None:
    contents = "[optimizer]" if asked else "[optimizer,hf_model]"
    message = problem(f"{A}.checkpoint.save_contents={contents}", "trainer.save_freq=1", *asked)
    assert "add model" in message


GDPO = "algorithm.adv_estimator=gdpo"
COMPONENTS = "algorithm.reward_components=[correct,format]"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([GDPO], "set algorithm.reward_components=[correct,format]"),
        ([GDPO, *MODEL], "set algorithm.reward_components=[correct,format]"),
        (
            [
                GDPO,
                "reward.functions=[{label: correct}]",
                f"{R}.multi_turn.enable=true",
                f"{R}.multi_turn.environment=g.py:G",
            ],
            "set algorithm.reward_components=[correct,format]",
        ),
        ([GDPO, "algorithm.reward_components=[a,b,a]"], "a is listed more than once"),
        ([GDPO, COMPONENTS, "algorithm.component_weights=[1]"], "1 weights for 2 names"),
        ([GDPO, COMPONENTS, "algorithm.use_kl_in_reward=true"], f"set algorithm.use_kl_in_reward=false and {A}.use_kl"),
    ],
)
def test_gdpo_needs_components_and_a_weight_for_each(overrides: list[str], says: str) -> None:
    assert says in problem(*overrides)


def test_parts_of_the_score_that_gdpo_does_not_see_are_reported() -> None:
    overlong = ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=9"]
    [hint] = hints(GDPO, COMPONENTS, *overlong)
    assert "add overlong_penalty" in hint
    assert hints(GDPO, "algorithm.reward_components=[correct,overlong_penalty]", *overlong) == []
    assert hints(GDPO, *overlong) == []


def test_components_are_for_gdpo_and_custom_estimators() -> None:
    [hint] = hints(COMPONENTS)
    assert hint.endswith("has no effect: only algorithm.adv_estimator=gdpo uses it")
    assert hints(COMPONENTS, "algorithm.adv_estimator=my_module:function") == []


def test_the_usual_settings_of_gdpo_are_understood() -> None:
    keys = "+algorithm.gdpo_reward_keys=[correct,format]", "+algorithm.gdpo_reward_weights=[1,2]"
    [loaded] = load([f"{R}.n=8", GDPO, *keys, "reward.reward_manager.name=gdpo"], complete=False)
    algorithm = loaded.config.algorithm
    assert (algorithm.reward_components, algorithm.component_weights) == (["correct", "format"], [1.0, 2.0])
    assert loaded.config.reward.reward_manager.name == "naive"


def test_a_learning_rate_that_destroys_the_model_gets_a_hint() -> None:
    assert any(f"{A}.optim.lr: 1000 is far above usual learning rates" in hint for hint in hints(f"{A}.optim.lr=1e3"))
    assert not any("optim.lr" in hint for hint in hints(f"{A}.optim.lr=2e-2"))
