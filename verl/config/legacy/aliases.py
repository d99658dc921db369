"""Aliases of keys and values: accepted, replaced by the canonical one, and reported with a hint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path as File
from typing import Any, NamedTuple

from verl.config.paths import Path, Tree, format_value, iter_leaves, join_path, set_path

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_ADAPTER = ("lora_rank", "lora_alpha", "target_modules")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_MODEL_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_OPTIM = {
    "warmup_steps_proportion": "lr_warmup_steps_ratio",
    "lr_scheduler": "lr_scheduler_type",
    "lr_decay_style": "lr_scheduler_type",
    "warmup_style": "lr_scheduler_type",
    "optimizer": "name",
}
_OPTIMIZERS = {"AdamW": "adamw", "FusedAdam": "adamw", "AdamW8bit": "adamw_8bit"}
_WARMUP_BY_RATIO = {"-1": None}
_LOGGERS = {"file": "jsonl"}
_STRATEGIES = {"fsdp": "fsdp2"}
_ENGINE = (
    *("param_offload", "optimizer_offload", "offload_policy", "reshard_after_forward", "model_dtype", "dtype"),
    "fsdp_size",
)
_ULYSSES = "ulysses_sequence_parallel_size"
_FORWARDED = (
    *("enable_chunked_prefill", "enable_prefix_caching", "cudagraph_capture_sizes", "disable_log_stats"),
    "scheduling_policy",
)
"""Names in the rollout section that are passed to vLLM."""
_REWARD_ENGINE = ("gpu_memory_utilization", "tensor_model_parallel_size")
_RESUME_MODES = {"resume_path": "path"}
_PROFILE = "trainer.profile"
_PROFILER = {
    "global_profiler.tool": f"{_PROFILE}.tools",
    "global_profiler.steps": f"{_PROFILE}.steps",
    "global_profiler.save_path": f"{_PROFILE}.directory",
    **{f"{_ACTOR}.profiler.{name}": f"{_PROFILE}.{name}" for name in ("enable", "ranks", "all_ranks")},
}
_PROFILE_TOOLS = {"torch_memory": "memory"}


class Aliases(NamedTuple):
    """The aliases of one run type.

    `keys` maps aliases to canonical keys: an alias of a section covers all keys below it, and the longest match wins.
    `values` maps aliases of values, as `format_value` writes them, to canonical values, by canonical key. The settings
    of `unset_by_null` cannot be null; where launch scripts set them to null, they are not given.
    """

    keys: Mapping[str, str]
    values: Mapping[str, Mapping[str, Any]]
    unset_by_null: frozenset[str] = frozenset()

    def unsets(self, path: Path, value: Any) -> bool:
        """Whether the value of a canonical path means that the setting is not given."""
        return value is None and join_path(path) in self.unset_by_null


TRAIN_ALIASES = Aliases(
    {
        f"{_ROLLOUT}.multi_turn.max_assistant_turns": f"{_ROLLOUT}.multi_turn.max_turns",
        # the sections of the policy, without their common parent
        "actor": _ACTOR,
        "rollout": _ROLLOUT,
        "ref": "actor_rollout_ref.ref",
        "model": _MODEL,
        "optim": f"{_ACTOR}.optim",
        # rewards
        "custom_reward_function": "reward.custom_reward_function",
        "reward_model": "reward.reward_model",
        "reward_model.num_workers": "reward.num_workers",
        **dict.fromkeys(("sandbox_fusion.url", "reward.sandbox_fusion.url"), "reward.sandbox.url"),
        **dict.fromkeys(
            ("sandbox_fusion.memory_limit_mb", "reward.sandbox_fusion.memory_limit_mb"), "reward.sandbox.memory_mb"
        ),
        "reward_model.reward_fn": "reward.custom_reward_function",
        "reward_model.reward_manager": "reward.reward_manager.name",
        "reward_model.overlong_buffer": "reward.overlong_buffer",
        "reward.reward_model.reward_fn": "reward.custom_reward_function",
        "reward.reward_model.model.path": "reward.reward_model.model_path",
        "reward.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer",
        "reward.reward_model.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer",
        # Ray
        "ray_init": "ray_kwargs.ray_init",
        "ray_init.timeline_file": "ray_kwargs.timeline_json_file",
        "ray_kwargs.ray_init.timeline_file": "ray_kwargs.timeline_json_file",
        "ray_kwargs.ray_init.timeline_json_file": "ray_kwargs.timeline_json_file",
        f"{_ACTOR}.fsdp_config.{_ULYSSES}": f"{_ACTOR}.{_ULYSSES}",
        # adapters
        **{f"{_ACTOR}.{name}": f"{_ACTOR}.peft.{name}" for name in _ADAPTER},
        **{f"{_MODEL}.{name}": f"{_ACTOR}.peft.{name}" for name in _ADAPTER},
        **{f"critic.{name}": f"critic.peft.{name}" for name in _ADAPTER},
        **{f"critic.model.{name}": f"critic.peft.{name}" for name in _ADAPTER},
        **{
            f"{model}.lora.{alias}": f"{section}.peft.{name}"
            for model, section in ((_MODEL, _ACTOR), ("critic.model", "critic"))
            for alias, name in {"rank": "lora_rank", "alpha": "lora_alpha", "target_modules": "target_modules"}.items()
        },
        f"{_MODEL}.lora.adapter_path": f"{_MODEL}.lora_adapter_path",
        f"{_MODEL}.lora.merge": f"{_ROLLOUT}.lora_transport",
        f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": f"{_ROLLOUT}.update_weights_bucket_megabytes",
        # generation
        **{f"{_ROLLOUT}.{name}": f"{_ROLLOUT}.engine_kwargs.vllm.{name}" for name in _FORWARDED},
        f"{_ROLLOUT}.prompt_length": "data.max_prompt_length",
        f"{_ROLLOUT}.response_length": "data.max_response_length",
        # profiles
        **_PROFILER,
        # distillation
        "distillation.enabled": "distillation.enable",
        "distillation.distillation_loss.use_task_rewards": "distillation.use_task_rewards",
        "distillation.distillation_loss.use_policy_gradient": "distillation.mode",
        "distillation.distillation_loss.distillation_loss_coef": "distillation.coef",
        "distillation.distillation_loss.log_prob_min_clamp": "distillation.log_prob_min_clamp",
        "distillation.distillation_loss.loss_max_clamp": "distillation.loss_max_clamp",
        "distillation.teacher_models.teacher_model.model_path": "distillation.teacher.path",
        # single settings
        "data.tokenizer": f"{_MODEL}.tokenizer_path",
        **{f"{_ACTOR}.{name}": f"{_ACTOR}.policy_loss.{name}" for name in ("tau_pos", "tau_neg")},
        "trainer.nnode": "trainer.nnodes",
        "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpts_to_keep",
        "trainer.max_ckpt_to_keep": "trainer.max_ckpts_to_keep",
        "data.filter_overlong_prompts_workers": "data.num_workers",
        "critic.fsdp": "critic.fsdp_config",
        "critic.model.fsdp_config": "critic.fsdp_config",
        "algorithm.gdpo_reward_keys": "algorithm.reward_components",
        "algorithm.gdpo_reward_weights": "algorithm.component_weights",
        f"{_MODEL}.dtype": f"{_ACTOR}.fsdp_config.dtype",
        f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype": f"{_ACTOR}.fsdp_config.dtype",
        **{f"{_ACTOR}.optim.{alias}": f"{_ACTOR}.optim.{name}" for alias, name in _OPTIM.items()},
        **{f"critic.optim.{alias}": f"critic.optim.{name}" for alias, name in _OPTIM.items()},
        f"{_ACTOR}.optim.clip_grad": f"{_ACTOR}.grad_clip",
        "critic.optim.clip_grad": "critic.grad_clip",
    },
    {
        f"{_ACTOR}.strategy": _STRATEGIES,
        "critic.strategy": _STRATEGIES,
        **{f"{section}.optim.name": _OPTIMIZERS for section in (_ACTOR, "critic")},
        **{f"{section}.optim.lr_warmup_steps": _WARMUP_BY_RATIO for section in (_ACTOR, "critic")},
        "trainer.logger": _LOGGERS,
        f"{_PROFILE}.tools": _PROFILE_TOOLS,
        f"{_ROLLOUT}.lora_transport": {"true": "merged", "false": "auto"},
        "distillation.mode": {"true": "reward", "false": "loss"},
        "critic.fsdp_config.dtype": _DTYPES,
        "critic.fsdp_config.model_dtype": _MODEL_DTYPES,
        "trainer.resume_mode": _RESUME_MODES,
        "reward.reward_manager.name": {"gdpo": "naive"},
        f"{_ROLLOUT}.dtype": {"half": "float16", **_DTYPES},
        f"{_ACTOR}.fsdp_config.dtype": _DTYPES,
        f"{_ACTOR}.fsdp_config.model_dtype": _MODEL_DTYPES,
        f"{_ROLLOUT}.nnodes": {"0": None},
    },
    frozenset(
        {
            *(f"{section}.optim.lr_scheduler_type" for section in (_ACTOR, "critic")),
            *(f"{section}.ppo_micro_batch_size_per_gpu" for section in (_ACTOR, "critic")),
            "algorithm.filter_groups.metric",
            "algorithm.rollout_correction.rollout_rs_threshold",
            *("reward.custom_reward_function.name", "reward.num_workers", "reward.reward_manager.name"),
            *("reward.reward_model.enable", "reward.sandbox.memory_mb"),
            *(f"reward.reward_model.rollout.{name}" for name in ("name", *_REWARD_ENGINE)),
            "trainer.profile.tools",
        }
    ),
)
SFT_ALIASES = Aliases(
    {
        "model.partial_pretrain": "model.path",
        "model.dtype": "model.fsdp_config.dtype",
        **{f"model.{name}": f"model.peft.{name}" for name in _ADAPTER},
        **{f"optim.{alias}": f"optim.{name}" for alias, name in _OPTIM.items()},
        "optim.clip_grad": "optim.grad_clip",
        "trainer.nnode": "trainer.nnodes",
        "trainer.max_ckpt_to_keep": "trainer.max_ckpts_to_keep",
        "trainer.checkpoint": "checkpoint",
        "data.use_dynamic_bsz": "data.packing",
        **{f"engine.{name}": f"model.fsdp_config.{name}" for name in _ENGINE},
        **dict.fromkeys((f"engine.{_ULYSSES}", _ULYSSES), f"model.{_ULYSSES}"),
        "engine.ep_size": "model.fsdp_config.expert_parallel_size",
        "engine.activation_checkpointing": "model.enable_gradient_checkpointing",
        "ray_init": "ray_kwargs.ray_init",
    },
    {
        "trainer.resume_mode": _RESUME_MODES,
        "model.fsdp_config.dtype": _DTYPES,
        "model.fsdp_config.model_dtype": _MODEL_DTYPES,
        "model.strategy": _STRATEGIES,
        "optim.name": _OPTIMIZERS,
        "optim.lr_warmup_steps": _WARMUP_BY_RATIO,
        "trainer.logger": _LOGGERS,
    },
)

_STEPS = re.compile(r"global_steps_(\d+)")


def canonicalize(path: Path, value: Any, hints: list[str], aliases: Aliases) -> tuple[Path, Any]:
    """Return the canonical path and value of a setting, and add a hint for each alias that was used."""
    target = resolve_alias(path, aliases)
    if target != path:
        hints.append(f"{join_path(path)} is an alias of {join_path(target)}")
    return target, _canonical_value(join_path(target), value, hints, aliases)


def canonicalize_tree(tree: Mapping[str, Any], hints: list[str], problems: list[str], aliases: Aliases) -> Tree:
    """Return the same settings under their canonical keys; one setting with two values is a problem."""
    result: Tree = {}
    seen: dict[Path, tuple[Path, Any]] = {}
    for path, value in iter_leaves(tree):
        target, meant = canonicalize(path, value, hints, aliases)
        if aliases.unsets(target, meant):
            continue
        if target in seen and seen[target][1] != meant:
            first, other = seen[target]
            key, new, old = join_path(target), format_value(meant), format_value(other)
            problems.append(
                f"{join_path(path)}: {new} contradicts {join_path(first)}={old}: both are {key}; keep only {key}={new}"
            )
        seen[target] = (path, meant)
        set_path(result, target, meant)
    return result


def resolve_alias(path: Path, aliases: Aliases) -> Path:
    """Return the canonical path of an alias, and any other path unchanged."""
    for _ in range(len(aliases.keys)):  # a canonical key may start with another alias: actor.lora_rank
        for length in range(len(path), 0, -1):
            target = aliases.keys.get(join_path(path[:length]))
            if target is not None:
                path = (*target.split("."), *path[length:])
                break
        else:
            return path
    raise AssertionError(f"the aliases of {join_path(path)} are circular")


def _canonical_value(key: str, value: Any, hints: list[str], aliases: Aliases) -> Any:
    known = aliases.values.get(key, {})
    meant: Any
    if isinstance(value, list):
        meant = [known.get(item, item) if isinstance(item, str) else item for item in value]
    elif isinstance(value, str | bool | int):
        meant = known.get(format_value(value), value)
    else:
        return value
    if key == "trainer.resume_from_path" and isinstance(value, str) and not File(value).expanduser().exists():
        meant = _STEPS.sub(r"global_step_\1", value)
    if meant != value:
        hints.append(f"{key}={format_value(value)} is an alias of {key}={format_value(meant)}")
    return meant
