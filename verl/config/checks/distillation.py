"""Checks of `distillation.*` against other settings."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.checks.conflict import Conflict
from verl.config.features import uses_preferences
from verl.config.schema import Config
from verl.config.schema.conditions import ACTOR, LOSS

_TEMPLATE = "distillation.teacher.use_own_chat_template=true"
_REWARDS = "distillation.use_task_rewards"


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield settings that cannot work with distillation."""
    distillation, algorithm, data = config.distillation, config.algorithm, config.data
    if not distillation.enable:
        return
    if distillation.teacher.path is None:
        fix = "set distillation.teacher.path=Qwen/Qwen2.5-7B-Instruct, or another model with the policy's tokenizer"
        yield Conflict("distillation.enable", "true requires a teacher", fix)
    if distillation.teacher.use_own_chat_template and not data.filter_overlong_prompts and data.truncation != "error":
        yield Conflict(
            "data.truncation",
            f"{data.truncation} would remove other parts of a prompt from the policy's rendering than from the "
            f"teacher's, which {_TEMPLATE} adds",
            "set data.filter_overlong_prompts=true to drop long prompts, or data.truncation=error",
        )
    if uses_preferences(config) and (distillation.mode == "reward" or not distillation.use_task_rewards):
        mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
        yield Conflict(
            "distillation.mode",
            f"{distillation.mode} needs a policy loss with advantages, but {LOSS}={mode} compares scored responses",
            f"set {LOSS}=vanilla" + (", or distillation.mode=loss" if distillation.use_task_rewards else ""),
        )
    if distillation.use_task_rewards:
        return
    for key, is_on, fix in (
        ("algorithm.filter_groups.enable", algorithm.filter_groups.enable, "=false"),
        ("algorithm.use_kl_in_reward", algorithm.use_kl_in_reward, f"set {ACTOR}.use_kl_loss=true instead"),
        ("reward.prime.enable", config.reward.prime.enable, "=false"),
    ):
        if is_on:
            reason = f"true requires rewards, but {_REWARDS}=false scores no training response"
            yield Conflict(key, reason, f"{fix}, or {_REWARDS}=true")


def find_hints(config: Config) -> Iterator[Conflict]:
    """Yield a teacher that has nothing to teach."""
    if config.distillation.enable and config.distillation.teacher.path == config.actor_rollout_ref.model.path:
        reason = "is the model that is trained, so the policy is only regularized toward its initial weights"
        yield Conflict("distillation.teacher.path", reason, "set it to a stronger model")
