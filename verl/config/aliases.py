"""Aliases of keys and values: accepted, replaced by the canonical one, and reported with a hint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path as File
from typing import Any, NamedTuple

from verl.config.paths import Path, Tree, format_value, iter_leaves, join_path, set_path

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_ADAPTER = ("lora_rank", "lora_alpha", "target_modules")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_MODEL_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_OPTIM = {
    "warmup_steps_proportion": "lr_warmup_steps_ratio",
    "lr_scheduler": "lr_scheduler_type",
    "warmup_style": "lr_scheduler_type",
}
_OLD_SCORERS = ("code", "format", "gsm8k", "json_schema", "math", "qa")
_RESUME_MODES = {"resume_path": "path"}


class Aliases(NamedTuple):
    """The aliases of one run type.

    `keys` maps aliases to canonical keys: an alias of a section covers all keys below it, and the longest match wins.
    `values` maps aliases of values to canonical values, by canonical key.
    """

    keys: Mapping[str, str]
    values: Mapping[str, Mapping[str, str]]


TRAIN_ALIASES = Aliases(
    {
        # the sections of the policy, without their common parent
        "actor": _ACTOR,
        "rollout": "actor_rollout_ref.rollout",
        "ref": "actor_rollout_ref.ref",
        "model": _MODEL,
        "optim": f"{_ACTOR}.optim",
        # rewards
        "custom_reward_function": "reward.custom_reward_function",
        "reward_model": "reward.reward_model",
        "reward_model.reward_fn": "reward.custom_reward_function",
        "reward_model.reward_manager": "reward.reward_manager.name",
        "reward_model.overlong_buffer": "reward.overlong_buffer",
        "reward.reward_model.reward_fn": "reward.custom_reward_function",
        "reward.reward_model.model.path": "reward.reward_model.model_path",
        # Ray
        "ray_init": "ray_kwargs.ray_init",
        "ray_init.timeline_file": "ray_kwargs.timeline_json_file",
        "ray_kwargs.ray_init.timeline_file": "ray_kwargs.timeline_json_file",
        "ray_kwargs.ray_init.timeline_json_file": "ray_kwargs.timeline_json_file",
        # adapters
        **{f"{_ACTOR}.{name}": f"{_ACTOR}.peft.{name}" for name in _ADAPTER},
        **{f"{_MODEL}.{name}": f"{_ACTOR}.peft.{name}" for name in _ADAPTER},
        **{f"critic.{name}": f"critic.peft.{name}" for name in _ADAPTER},
        **{f"critic.model.{name}": f"critic.peft.{name}" for name in _ADAPTER},
        # single settings
        "trainer.nnode": "trainer.nnodes",
        "algorithm.gdpo_reward_keys": "algorithm.reward_components",
        "algorithm.gdpo_reward_weights": "algorithm.component_weights",
        f"{_MODEL}.dtype": f"{_ACTOR}.fsdp_config.dtype",
        f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype": f"{_ACTOR}.fsdp_config.dtype",
        **{f"{_ACTOR}.optim.{alias}": f"{_ACTOR}.optim.{name}" for alias, name in _OPTIM.items()},
    },
    {
        f"{_ACTOR}.strategy": {"fsdp": "fsdp2"},
        "critic.strategy": {"fsdp": "fsdp2"},
        "critic.fsdp_config.dtype": _DTYPES,
        "critic.fsdp_config.model_dtype": _MODEL_DTYPES,
        "trainer.resume_mode": _RESUME_MODES,
        "reward.reward_manager.name": {"gdpo": "naive"},
        "reward.custom_reward_function.path": {
            **{f"verl.rewards.{name}": f"verl.rewards.scorers.{name}" for name in _OLD_SCORERS},
            "verl.rewards.choice": "verl.rewards.scorers.multiple_choice",
            "verl.rewards.exact": "verl.rewards.scorers.exact_match",
        },
        "actor_rollout_ref.rollout.dtype": {"half": "float16", **_DTYPES},
        f"{_ACTOR}.fsdp_config.dtype": _DTYPES,
        f"{_ACTOR}.fsdp_config.model_dtype": _MODEL_DTYPES,
    },
)
SFT_ALIASES = Aliases(
    {
        "model.partial_pretrain": "model.path",
        "model.dtype": "model.fsdp_config.dtype",
        **{f"model.{name}": f"model.peft.{name}" for name in _ADAPTER},
        **{f"optim.{alias}": f"optim.{name}" for alias, name in _OPTIM.items()},
        "optim.clip_grad": "optim.grad_clip",
        "trainer.nnode": "trainer.nnodes",
        "trainer.checkpoint": "checkpoint",
        "ray_init": "ray_kwargs.ray_init",
    },
    {
        "trainer.resume_mode": _RESUME_MODES,
        "model.fsdp_config.dtype": _DTYPES,
        "model.fsdp_config.model_dtype": _MODEL_DTYPES,
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
    if not isinstance(value, str):
        return value
    meant = aliases.values.get(key, {}).get(value, value)
    if key == "trainer.resume_from_path" and not File(value).expanduser().exists():
        meant = _STEPS.sub(r"global_step_\1", value)
    if meant != value:
        hints.append(f"{key}={value} is an alias of {key}={meant}")
    return meant
