"""Converts the settings of the reward to those of reward functions and reward components."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.config.features import has_environment, uses_reward_function, uses_task_rewards
from verl.config.schema.conditions import is_custom_function
from verl.config.schema.reward import RewardConfig
from verl.config.schema.root import Config
from verl.rewards.compose import get_label
from verl.rewards.reward_function import pack_function
from verl.rewards.sandbox.sandbox import read_limits
from verl.rewards.settings import RewardFunctionSettings


def reward_components(config: Config) -> dict[str, float]:
    """Return the weights of the reward components that the estimator sees, by name.

    Without names they are the parts that the score is a sum of; an environment's score has no parts of its own. Only
    gdpo and custom estimators use components.
    """
    reward, algorithm = config.reward, config.algorithm
    uses_components = algorithm.adv_estimator == "gdpo" or is_custom_function(algorithm.adv_estimator)
    if not uses_components or not uses_task_rewards(config):
        return {}
    parts: dict[str, float] = {}
    if not has_environment(config):
        parts = {get_label(part): float(part.get("weight", 1.0)) for part in reward.functions}
        if reward.reward_model.enable and uses_reward_function(config):
            parts = (parts or {"function_score": 1.0}) | {"model_score": reward.reward_model.weight}
    if reward.overlong_buffer.enable:
        parts = (parts or {"raw_score": 1.0}) | {"overlong_penalty": 1.0}
    names = algorithm.reward_components or list(parts)
    weights = algorithm.component_weights or [parts.get(name, 1.0) for name in names]
    return dict(zip(names, weights, strict=True))


def reward_function_settings(
    config: Config, episode_workers: int = 1, function: Callable[..., Any] | None = None
) -> RewardFunctionSettings:
    """Return the reward function of each episode worker, or `function` if one was passed as a Python object.

    Episode workers share the reward processes equally.
    """
    reward, custom = config.reward, config.reward.custom_reward_function
    processes = reward.num_workers if reward.reward_manager.name == "prime" else 1
    return RewardFunctionSettings(
        path=custom.path,
        name=custom.name,
        kwargs=custom.reward_kwargs,
        functions=[dict(one) for one in reward.functions],
        batch_size=reward.batch_size if reward.reward_manager.name == "batch" else None,
        builtin_kwargs=_builtin_kwargs(reward),
        function=function if function is None or config.trainer.local else pack_function(function),
        workers=0 if config.trainer.local else -(-processes // episode_workers),
        timeout_s=reward.deadline_s,
        memory_mb=reward.memory_mb,
    )


def _builtin_kwargs(reward: RewardConfig) -> dict[str, dict[str, Any]]:
    """Return further arguments of built-in scorers, by module; empty if all settings have their defaults."""
    sandbox, code = reward.sandbox, reward.code
    if (sandbox, code) == (type(sandbox)(), type(code)()):
        return {}
    arguments = {
        "limits": read_limits(sandbox),
        "sandbox_url": sandbox.url,
        "require": sandbox.require,
        "partial": code.partial,
    }
    return {"verl.rewards.scorers.code": arguments}
