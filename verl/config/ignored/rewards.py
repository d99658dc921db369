"""Settings without effect: of reward functions, reward models and sandboxes."""

from __future__ import annotations

from verl.config.features import may_score_code, uses_reward_function
from verl.config.ignored.rule import IgnoredRule
from verl.config.problems import list_keys_below, prefix_keys

__all__ = ["REWARDS"]

_MODEL = "reward.reward_model"

REWARDS = (
    IgnoredRule(
        tuple(key for key in list_keys_below(_MODEL) if key != f"{_MODEL}.enable"),
        lambda c: not c.reward.reward_model.enable,
        f"{_MODEL}.enable=false",
        (f"{_MODEL}.enable",),
    ),
    IgnoredRule(
        (f"{_MODEL}.weight",),
        lambda c: not uses_reward_function(c),
        "the reward model alone is the reward",
        ("reward.custom_reward_function.path", "reward.functions"),
    ),
    IgnoredRule(
        (f"{_MODEL}.rollout.gpu_memory_utilization",),
        lambda c: c.reward.reward_model.rollout.name == "hf",
        f"{_MODEL}.rollout.name=hf takes what it needs",
        (f"{_MODEL}.rollout.name",),
    ),
    IgnoredRule(
        (f"{_MODEL}.rollout.gpu_memory_utilization",),
        lambda c: c.trainer.device == "cpu",
        "trainer.device=cpu",
        ("trainer.device",),
    ),
    IgnoredRule(
        ("reward.memory_mb", "reward.num_workers", "reward.batch_size", "reward.reward_manager.name"),
        lambda c: not uses_reward_function(c),
        f"{_MODEL} alone scores, and no function",
        (f"{_MODEL}.enable", "reward.custom_reward_function.path", "reward.functions"),
    ),
    IgnoredRule(
        ("reward.num_workers",),
        lambda c: c.reward.reward_manager.name != "prime",
        "only reward.reward_manager.name=prime scores in several processes",
        ("reward.reward_manager.name",),
    ),
    IgnoredRule(
        ("reward.batch_size",),
        lambda c: c.reward.reward_manager.name != "batch",
        "only reward.reward_manager.name=batch takes several answers at once",
        ("reward.reward_manager.name",),
    ),
    IgnoredRule(
        prefix_keys("reward.custom_reward_function", "path", "name", "reward_kwargs"),
        lambda c: bool(c.reward.functions),
        "reward.functions is given, and holds all of them",
        ("reward.functions",),
    ),
    IgnoredRule(
        prefix_keys("reward.custom_reward_function", "name", "reward_kwargs"),
        lambda c: c.reward.custom_reward_function.path is None,
        "reward.custom_reward_function.path is not given",
        ("reward.custom_reward_function.path",),
    ),
    IgnoredRule(
        (*list_keys_below("reward.sandbox"), *list_keys_below("reward.code")),
        lambda c: not may_score_code(c),
        "only verl.rewards.scorers.code runs programs, and it scores nothing here",
        ("reward.custom_reward_function.path", "reward.functions"),
    ),
    IgnoredRule(
        prefix_keys("reward.sandbox", "processes", "require"),
        lambda c: c.reward.sandbox.url is not None,
        "reward.sandbox.url is given: how programs are walled in there is the service's affair",
        ("reward.sandbox.url",),
    ),
)
