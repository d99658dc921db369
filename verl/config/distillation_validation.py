"""Checks of `distillation.*` against other settings."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.features import uses_preferences
from verl.config.schema import Config
from verl.config.schema.rules import ACTOR, LOSS

_ALONE = "distillation.use_task_rewards=false scores no training response"


def find_conflicts(config: Config) -> Iterator[str]:
    """Yield settings that cannot work with distillation."""
    distillation, algorithm = config.distillation, config.algorithm
    if not distillation.enable:
        return
    if distillation.teacher.path is None:
        yield (
            "distillation.enable: true requires a teacher; set distillation.teacher.path=Qwen/Qwen2.5-7B-Instruct, or "
            "another model with the policy's tokenizer"
        )
    data = config.data
    if distillation.teacher.use_own_chat_template and not data.filter_overlong_prompts and data.truncation != "error":
        yield (
            f"data.truncation: {data.truncation} would remove other parts of a prompt from the policy's rendering than "
            "from the teacher's, which distillation.teacher.use_own_chat_template=true adds; set "
            "data.filter_overlong_prompts=true to drop long prompts, or data.truncation=error"
        )
    if uses_preferences(config) and (distillation.mode == "reward" or not distillation.use_task_rewards):
        mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
        yield (
            f"distillation.mode: {distillation.mode} needs a policy loss with advantages, but {LOSS}={mode} compares "
            f"scored responses; set {LOSS}=vanilla"
            + ("" if not distillation.use_task_rewards else ", or distillation.mode=loss")
        )
    if distillation.use_task_rewards:
        return
    for key, is_on, fix in (
        ("algorithm.filter_groups.enable", algorithm.filter_groups.enable, "algorithm.filter_groups.enable=false"),
        ("algorithm.use_kl_in_reward", algorithm.use_kl_in_reward, f"{ACTOR}.use_kl_loss=true instead"),
        ("reward.prime.enable", config.reward.prime.enable, "reward.prime.enable=false"),
    ):
        if is_on:
            yield f"{key}: true requires rewards, but {_ALONE}; set {fix}, or distillation.use_task_rewards=true"


def find_hints(config: Config) -> Iterator[str]:
    """Yield settings of distillation that work but are probably a mistake."""
    path = config.distillation.teacher.path
    if config.distillation.enable and path == config.actor_rollout_ref.model.path:
        yield (
            "distillation.teacher.path: is the model that is trained, so the policy is only held where it starts; set "
            "it to a stronger model"
        )
