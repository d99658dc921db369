"""Settings as users write them: whole examples, and aliases."""

from __future__ import annotations

import textwrap

import pytest
import yaml

from verl.config.load import load, load_dict
from verl.config.paths import get_path, get_value
from verl.errors import ConfigError

pytestmark = pytest.mark.unit

DATA = """
data:
  train_files: /data/gsm8k/train.parquet
  val_files: /data/gsm8k/test.parquet
  max_prompt_length: 512
"""

GRPO = (
    DATA
    + """
  train_batch_size: 128
  max_response_length: 1024
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B-Instruct}
  actor:
    optim: {lr: 1e-6}
    use_kl_loss: true
    kl_loss_coef: 0.001
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 2
  rollout: {name: vllm, n: 8, temperature: 1.0, tensor_model_parallel_size: 2, gpu_memory_utilization: 0.5}
algorithm: {adv_estimator: grpo}
trainer: {n_gpus_per_node: 4, total_epochs: 20}
"""
)

PPO = (
    DATA
    + """
  train_batch_size: 256
  max_response_length: 512
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B-Instruct}
  actor:
    optim: {lr: 1e-6}
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 4
    ppo_epochs: 1
    clip_ratio: 0.2
    grad_clip: 1.0
    entropy_coeff: 0.0
    use_torch_compile: true
  rollout: {name: vllm, tensor_model_parallel_size: 1, gpu_memory_utilization: 0.4, temperature: 1.0, top_p: 1.0, n: 1}
  ref: {log_prob_micro_batch_size_per_gpu: 4}
critic:
  model: {path: Qwen/Qwen2.5-7B-Instruct}
  optim: {lr: 1e-5}
  ppo_micro_batch_size_per_gpu: 4
algorithm:
  adv_estimator: gae
  kl_ctrl: {kl_coef: 0.001}
trainer:
  n_gpus_per_node: 4
  nnodes: 1
  total_epochs: 15
  save_freq: 10
  logger: ["console", "wandb"]
  project_name: ppo-gsm8k
"""
)


def read(text: str, *overrides: str):
    return load_dict(yaml.safe_load(textwrap.dedent(text)) or {}, overrides, complete=False)


def find_unsupported(text: str, *overrides: str) -> set[str]:
    """The keys that are refused; fails if any is refused for another reason than not being built."""
    with pytest.raises(ConfigError) as raised:
        read(text, *overrides)
    assert all("not supported yet" in problem for problem in raised.value.problems), raised.value.problems
    return {problem.split(":")[0] for problem in raised.value.problems}


def test_the_grpo_example_loads_without_hints() -> None:
    loaded = load_dict(yaml.safe_load(GRPO))
    assert loaded.hints == ()
    assert loaded.config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert loaded.config.actor_rollout_ref.rollout.n == 8


def test_the_ppo_example_loads() -> None:
    loaded = read(PPO)
    assert loaded.config.algorithm.adv_estimator == "gae"
    assert loaded.config.critic.ppo_micro_batch_size_per_gpu == 4
    assert [hint.partition("=")[0] for hint in loaded.hints] == [
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",  # nothing uses a reference
        "algorithm.kl_ctrl.kl_coef",
    ]


def test_the_dapo_snippet_loads() -> None:
    config = read("actor_rollout_ref: {actor: {clip_ratio_low: 0.2, clip_ratio_high: 0.28}}").config
    assert config.actor_rollout_ref.actor.clip_range == (0.2, 0.28)


def test_the_offloading_snippets_load() -> None:
    text = (
        "actor_rollout_ref: {actor: {strategy: fsdp2, use_kl_loss: True, fsdp_config: {offload_policy: True, "
        "param_offload: True, optimizer_offload: True}}, ref: {fsdp_config: {param_offload: True}}}"
    )
    loaded = read(text)
    assert loaded.config.actor_rollout_ref.actor.fsdp_config.offload_policy
    assert loaded.config.actor_rollout_ref.ref.fsdp_config.param_offload
    said = [hint.partition("=")[0].rpartition(".")[2] for hint in loaded.hints if "has no effect" in hint]
    assert said == ["param_offload", "optimizer_offload"]  # offload_policy does both


def test_the_lora_snippet_loads() -> None:
    loaded = read(
        "actor_rollout_ref: {actor: {peft: {peft_type: lora, lora_rank: 16, lora_alpha: 32, "
        "target_modules: [q_proj, v_proj, k_proj, o_proj]}}}"
    )
    peft = loaded.config.actor_rollout_ref.actor.peft
    assert (peft.peft_type, peft.lora_rank, peft.lora_alpha) == ("lora", 16, 32)
    assert peft.target_modules == ["q_proj", "v_proj", "k_proj", "o_proj"]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (
            "reward: {reward_model: {enable: True, model_path: ~/models/rm, rollout: {name: sglang}}}",
            {"reward.reward_model.rollout.name"},
        ),
    ],
)
def test_settings_that_are_not_supported_yet_are_refused_by_name(text: str, keys: set[str]) -> None:
    assert find_unsupported(text) == keys


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("reward_model.reward_fn.path=/path/my_reward.py", "reward.custom_reward_function.path", "/path/my_reward.py"),
        ("reward_model.reward_fn.name=compute_reward", "reward.custom_reward_function.name", "compute_reward"),
        ("reward_model.enable=True reward_model.model.path=rm", "reward.reward_model.model_path", "rm"),
        ("custom_reward_function.path=r.py", "reward.custom_reward_function.path", "r.py"),
        ("ray_init.num_cpus=4", "ray_kwargs.ray_init.num_cpus", 4),
        ("trainer.nnode=4", "trainer.nnodes", 4),
        ("actor_rollout_ref.actor.lora_rank=16", "actor_rollout_ref.actor.peft.lora_rank", 16),
        ("actor.lora_rank=16", "actor_rollout_ref.actor.peft.lora_rank", 16),
        ("actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.actor.peft.lora_rank", 16),
        ("actor.lora_rank=8 model.lora_alpha=32", "actor_rollout_ref.actor.peft.lora_alpha", 32),
        ("algorithm.adv_estimator=gae critic.model.lora_rank=4", "critic.peft.lora_rank", 4),
        ("actor_rollout_ref.actor.strategy=fsdp", "actor_rollout_ref.actor.strategy", "fsdp2"),
        ("trainer.resume_mode=auto trainer.resume_from_path=x/global_steps_500", "trainer.resume_from_path", None),
    ],
)
def test_aliases_are_accepted_with_a_hint(override: str, key: str, value: object) -> None:
    [loaded] = load(override.split(" ") if "{" not in override else [override], complete=False)
    expected = "x/global_step_500" if value is None else value
    assert get_path(loaded.config, tuple(key.split("."))) == expected
    assert any(("alias of" in hint or "not needed" in hint) and key in hint for hint in loaded.hints)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("rollout.val_kwargs.temperature=0.5", "actor_rollout_ref.rollout.val_kwargs.temperature", 0.5),
        ("rollout={n: 4}", "actor_rollout_ref.rollout.n", 4),
        ("actor.clip_ratio=0.1", "actor_rollout_ref.actor.clip_ratio", 0.1),
        ("ref.log_prob_micro_batch_size_per_gpu=4", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", 4),
        ("model.path=tiny", "actor_rollout_ref.model.path", "tiny"),
    ],
)
def test_documented_short_names_are_accepted_without_a_hint(override: str, key: str, value: object) -> None:
    [loaded] = load([override], complete=False)
    assert get_path(loaded.config, tuple(key.split("."))) == value
    assert not any("alias of" in hint for hint in loaded.hints)


def test_megatron_may_be_chosen_and_set_under_short_names() -> None:
    overrides = ["model_engine=megatron", "actor.megatron.dtype=float32", "trainer.n_gpus_per_node=1"]
    [loaded] = load(overrides, complete=False)
    actor = loaded.config.actor_rollout_ref.actor
    assert (actor.strategy, actor.megatron.dtype) == ("megatron", "float32")


@pytest.mark.parametrize(
    "spelled", ["trainer.prometheus", "rollout.prometheus", "actor_rollout_ref.rollout.prometheus"]
)
def test_the_settings_of_prometheus_may_be_those_of_the_rollout(spelled: str) -> None:
    [loaded] = load([f"{spelled}.enable=true", f"{spelled}.port=9101"], complete=False)
    assert (loaded.config.trainer.prometheus.enable, loaded.config.trainer.prometheus.port) == (True, 9101)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("+trainer.wandb_proxy=http://proxy:80", "trainer.wandb_proxy"),
        ("+ray_kwargs.timeline_json_file=/tmp/t.json", "ray_kwargs.timeline_json_file"),
        ("ray_init.timeline_file=/tmp/t.json", "ray_kwargs.timeline_json_file"),
    ],
)
def test_documented_extras_are_known(override: str, key: str) -> None:
    assert get_value(read("", override).config, key) == override.partition("=")[2]


def test_a_checkpoint_that_is_really_called_global_steps_is_left_alone(tmp_path) -> None:
    (tmp_path / "global_steps_5").mkdir()
    override = f"trainer.resume_from_path={tmp_path}/global_steps_5"
    [loaded] = load(["trainer.resume_mode=path", override], complete=False)
    assert loaded.config.trainer.resume_from_path == f"{tmp_path}/global_steps_5"


def test_one_setting_under_two_spellings_must_not_have_two_values() -> None:
    with pytest.raises(ConfigError, match=r"contradicts actor_rollout_ref\.rollout\.n=4"):
        read("{actor_rollout_ref: {rollout: {n: 4}}, rollout: {n: 8}}")
    assert read("{actor_rollout_ref: {rollout: {n: 8}}, rollout: {n: 8}}").config.actor_rollout_ref.rollout.n == 8


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.clip_ratio=0.1",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "data.max_response_length=256",
        "actor_rollout_ref.rollout.enforce_eager=True",
        "data.prompt_key=question",
        "ray_kwargs.ray_init.num_cpus=4",
        "algorithm.norm_adv_by_std_in_grpo=True",
        "actor_rollout_ref.actor.grad_clip=1.0",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn=True",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "algorithm.use_kl_in_reward=False",
        "algorithm.kl_ctrl.kl_coef=0.01",
        "algorithm.kl_ctrl.kl_coef=0.05",
        "critic.ppo_micro_batch_size_per_gpu=1",
        "algorithm.adv_estimator=grpo_vectorized",
        "trainer.save_freq=10",
    ],
)
def test_documented_remedies_are_accepted(override: str) -> None:
    load([override], complete=False)
