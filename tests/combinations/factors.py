"""The factors of a run, and the settings of each of their levels. The first level of a factor is the plain one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from verl.config.schema.actor import Aggregation, PolicyLoss
from verl.config.schema.algorithm import CORRECTION_PRESETS, Estimator

Overrides = dict[str, Any]
Combination = dict[str, str]
"""The level of each factor."""

USER_CODE = Path(__file__).with_name("user_code.py")
ACTOR, ROLLOUT, REWARD = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "reward"
OWN_SCORE = "built-in or of the agent"
PROMPTS, RESPONSES = 2, 4  # of a step, and of a prompt
_FSDP, _TURNS, _CORRECTION = f"{ACTOR}.fsdp_config", f"{ROLLOUT}.multi_turn", "algorithm.rollout_correction"
_ADAPTER = {f"{ACTOR}.peft.lora_rank": 4, f"{ACTOR}.optim.lr": 1e-2}
_MOE = {"actor_rollout_ref.model.path": "experts"}


def _agent(agent: str = "tool_agent", *, branched: bool, **turns: Any) -> Overrides:
    return {
        f"{ROLLOUT}.agent.default_agent_loop": agent if agent == "tool_agent" else f"{USER_CODE}:{agent}",
        f"{_TURNS}.enable": True,
        f"{_TURNS}.format": "hermes",
        f"{_TURNS}.use_inference_chat_template": branched,
        **{f"{_TURNS}.{name}": value for name, value in turns.items()},
    }


def _in_both_ways(name: str, *agent: str, **turns: Any) -> dict[str, Overrides]:
    ways = {"appended": False, "branched": True}
    return {f"{name}, {way}": _agent(*agent, branched=branched, **turns) for way, branched in ways.items()}


def _kl_loss(kind: str) -> Overrides:
    return {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": kind, f"{ACTOR}.kl_loss_coef": 0.1}


def _kl_reward(kind: str, **control: Any) -> Overrides:
    control = {f"algorithm.kl_ctrl.{name}": value for name, value in {"kl_coef": 0.1, **control}.items()}
    return {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": kind, **control}


def _function(name: str) -> Overrides:
    return {f"{REWARD}.custom_reward_function.path": str(USER_CODE), f"{REWARD}.custom_reward_function.name": name}


def _distill(mode: str, **settings: Any) -> Overrides:
    return {
        "distillation.enable": True,
        "distillation.teacher.path": "teacher",
        "distillation.mode": mode,
        **{f"distillation.{name}": value for name, value in settings.items()},
    }


_ESTIMATORS = [name for name in get_args(Estimator) if not name.endswith("_vectorized")]  # which are other names
_OWN = "tests.combinations.user_code:own_estimator"
_MODEL = {f"{REWARD}.reward_model.enable": True, f"{REWARD}.reward_model.model_path": "reward"}
_MODEL |= {f"{REWARD}.reward_model.rollout.name": "hf"}
_FUNCTIONS = [
    {"path": str(USER_CODE), "name": f"score_{name}", "label": name, "weight": 0.5} for name in ("digits", "length")
]

FACTORS: Mapping[str, Mapping[str, Overrides]] = {
    "estimator": {
        **{name: {"algorithm.adv_estimator": name} for name in _ESTIMATORS},
        "gdpo": {"algorithm.adv_estimator": "gdpo", "algorithm.reward_components": ["score", "digits"]},
        "own": {"algorithm.adv_estimator": _OWN},
    },
    "loss": {name: {f"{ACTOR}.policy_loss.loss_mode": name} for name in get_args(PolicyLoss)}
    | {"cispo": {f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_low": 10.0}},
    "aggregation": {name: {f"{ACTOR}.loss_agg_mode": name} for name in get_args(Aggregation)},
    "KL": {
        "none": {},
        **{f"loss, {kind}": _kl_loss(kind) for kind in ("low_var_kl", "k2", "abs+", "unbiased", "full")},
        "reward, kl": _kl_reward("kl"),
        "reward, adaptive": _kl_reward("low_var_kl", type="adaptive", horizon=1000),
        "reward, full": _kl_reward("full"),
        "reward and loss": _kl_reward("kl") | _kl_loss("low_var_kl"),
    },
    "sampling": {
        "full": {},
        "mask": {f"{ROLLOUT}.top_k": 20, f"{ROLLOUT}.top_p": 0.9, f"{ROLLOUT}.keep_sampling_mask": True},
    },
    "correction": {
        "none": {},
        **{name: {f"{_CORRECTION}.preset": name} for name in CORRECTION_PRESETS},
        "several": {
            f"{_CORRECTION}.rollout_rs": "token_k1,seq_max_k2",
            f"{_CORRECTION}.rollout_rs_threshold": "2.0,0.5",
        },
        "bypass, reinforce": {
            f"{_CORRECTION}.preset": "bypass",
            f"{_CORRECTION}.loss_type": "reinforce",
            f"{_CORRECTION}.rollout_is": "token",
        },
    },
    "dynamic sampling": {
        "off": {},
        "on": {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "seq_final_reward"},
    },
    "agent": {
        "none": {},
        **_in_both_ways("tools", function_tool_path=str(USER_CODE)),
        **_in_both_ways("environment", environment=f"{USER_CODE}:Echo"),
        **_in_both_ways("gateway", "ask_twice_by_http"),
    },
    "reward": {
        "function": _function("score"),
        "functions": {f"{REWARD}.functions": _FUNCTIONS},
        "model": _MODEL,
        "function and model": _function("score") | _MODEL,
        "overlong": _function("score") | {"reward.overlong_buffer.enable": True, "reward.overlong_buffer.len": 16},
        "PRIME": _function("score") | {"reward.prime.enable": True, "reward.prime.lr": 1e-2},
        OWN_SCORE: {"reward.overlong_buffer.enable": True, "reward.overlong_buffer.len": 80},
    },
    "critic": {
        "none": {},
        "full": {"critic.enable": True},
        "warm-up": {"critic.enable": True, "trainer.critic_warmup": 1},
        "adapter": {"critic.enable": True, "critic.peft.lora_rank": 4},
    },
    "LoRA": {
        "none": {},
        "merged": _ADAPTER | {f"{ROLLOUT}.lora_transport": "merged"},
        "adapter": _ADAPTER | {f"{ROLLOUT}.lora_transport": "adapter"},
    },
    "dtype": {
        "float32": {},
        "bfloat16": {f"{_FSDP}.dtype": "bfloat16"},
        "float16": {f"{_FSDP}.dtype": "float16"},
        "bfloat16 weights": {
            **{f"{_FSDP}.dtype": "bfloat16", f"{_FSDP}.model_dtype": "bfloat16"},
            f"{_FSDP}.stochastic_rounding": True,
        },
    },
    "optimizer": {name: {f"{ACTOR}.optim.name": name} for name in ("adamw", "adamw_8bit", "muon")},
    "offload": {
        "none": {},
        "weights and moments": {f"{_FSDP}.param_offload": True, f"{_FSDP}.optimizer_offload": True},
        "policy": {f"{_FSDP}.offload_policy": True},
    },
    "activation checkpointing": {
        name: {
            "actor_rollout_ref.model.enable_gradient_checkpointing": is_on,
            "critic.model.enable_gradient_checkpointing": is_on,
        }
        for name, is_on in {"off": False, "on": True}.items()
    },
    "shared prompts": {"off": {}, "on": {f"{ACTOR}.use_prefix_grouper": True}},
    "packing": {
        "one sample": {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1, "critic.ppo_micro_batch_size_per_gpu": 1},
        "by samples": {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3, "critic.ppo_micro_batch_size_per_gpu": 2},
        "by tokens": {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 200},
    },
    "layout": {
        "FSDP": {},
        "HSDP": {f"{_FSDP}.fsdp_size": 1},
        "Ulysses": {f"{ACTOR}.ulysses_sequence_parallel_size": 2},
        "experts": _MOE | {f"{_FSDP}.expert_parallel_size": 2},
        "routing": _MOE | {f"{ACTOR}.router_replay.mode": "R2", f"{ACTOR}.router_aux_loss_coef": 0.01},
    },
    "ranks": {"1": {"trainer.n_gpus_per_node": 1}, "2": {"trainer.n_gpus_per_node": 2}},
    "transport": {name: {f"{ROLLOUT}.weight_transport": name} for name in ("host", "nccl", "ipc")},
    "sleep": {name: {f"{ROLLOUT}.free_cache_engine": is_on} for name, is_on in {"off": False, "on": True}.items()},
    "reference": {
        "fixed": {},
        "copied": {"trainer.ref_update_freq": 1},
        "EMA": {"trainer.ref_update_freq": 1, "trainer.ref_update_ratio": 0.5},
    },
    "distillation": {
        "none": {},
        "reward": _distill("reward"),
        "loss": _distill("loss", loss_max_clamp=5.0),
        "teacher alone": _distill("reward", use_task_rewards=False),
    },
    "resume": {"off": {"trainer.save_freq": 2}, "on": {"trainer.save_freq": 1}},
    "engine": {name: {f"{ROLLOUT}.name": name} for name in ("hf", "vllm")},
}
_SIZES = {
    "data.train_files": "train.parquet",
    "data.train_batch_size": PROMPTS,
    "data.max_prompt_length": 160,
    "data.max_response_length": 80,
    "actor_rollout_ref.model.path": "model",
    f"{ACTOR}.ppo_mini_batch_size": PROMPTS,
    f"{ACTOR}.optim.lr": 1e-3,
    f"{ROLLOUT}.n": RESPONSES,
    f"{_TURNS}.max_turns": 3,
    "trainer.total_training_steps": 2,
    "trainer.deterministic": True,
    "trainer.device": "cpu",
    "trainer.logger": ["none"],
    "trainer.default_local_dir": "run",
}
_FOLDERS = ("model.path", "model_path", "teacher.path", "train_files", "default_local_dir")


def plain() -> Combination:
    return {factor: next(iter(levels)) for factor, levels in FACTORS.items()}


def list_overrides(combination: Combination, folder: Path = Path()) -> Overrides:
    """Return the settings of a combination, with models and data in `folder`."""
    overrides = dict(_SIZES)
    for factor, level in combination.items():
        overrides |= _MOE if level == "experts, one rank" else FACTORS[factor][level]
    is_environment, reward = combination["agent"].startswith("environment"), combination["reward"]
    if combination["estimator"] == "gdpo" and (is_environment or reward in ("model", OWN_SCORE)):
        overrides["algorithm.reward_components"] = ["score"]  # nothing returns more
    if combination["agent"].startswith("gateway") and reward == OWN_SCORE:
        overrides[f"{ROLLOUT}.agent.default_agent_loop"] = f"{USER_CODE}:score_by_http"
    overrides["trainer.local"] = combination["ranks"] == "1" and combination["engine"] == "hf"
    return {
        key: str(folder / value) if key.endswith(_FOLDERS) and isinstance(value, str) else value
        for key, value in overrides.items()
    }
