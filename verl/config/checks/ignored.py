"""Report settings that are given but have no effect.

Most conditions are declared with the setting (`only_if` in `verl.config.schema`). The few that depend on which models
and functions a run uses are listed here.

A setting counts as given if its value differs from the default, or if it was written down with its default value:
`kl_coef=0.001` without a KL penalty is reported too. Two kinds of defaults are not mistakes and are not reported:
values that turn something off (false, null, 0, -1, an empty list), and sections that are listed completely, as
`verl config` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from verl.config.features import (
    may_score_code,
    scores_responses,
    uses_policy_as_reference,
    uses_reference,
    uses_reward_function,
    uses_task_rewards,
)
from verl.config.paths import format_value, get_path, get_value, is_overridden
from verl.config.schema import Config, Section, Setting, SftConfig, collect_settings
from verl.config.schema.conditions import ACTOR, REF
from verl.config.train_engines import get_train_engine


class _Rule(NamedTuple):
    """Settings, or whole sections, that have no effect unless `holds`."""

    settings: tuple[str, ...]
    holds: Callable[[Any], bool]
    reason: str


def _for_section(name: str, key: str, *others: str) -> _Rule:
    """Return the rule that the settings of a training engine's section have no effect with other engines."""

    def holds(config: Section) -> bool:
        return get_train_engine(str(get_value(config, f"{key}.strategy"))).section == name

    sections = (f"{key}.{name}", *(f"{other}.{name}" for other in others))
    return _Rule(sections, holds, f"the training engine of {key}.strategy has no such settings")


_RULES: dict[type[Section], tuple[_Rule, ...]] = {
    Config: (
        _for_section("fsdp_config", ACTOR, REF),
        _for_section("megatron", ACTOR, REF),
        _for_section("fsdp_config", "critic"),
        _for_section("megatron", "critic"),
        _Rule(
            (f"{REF}.log_prob_micro_batch_size_per_gpu", f"{REF}.log_prob_max_token_len_per_gpu"),
            lambda config: uses_reference(config) or config.distillation.enable,
            "neither a reference policy nor a teacher is used",
        ),
        _Rule(
            ("trainer.ref_update_freq", "trainer.ref_update_ratio", f"{REF}.fsdp_config", f"{REF}.megatron"),
            uses_reference,
            "no reference policy is used; it requires use_kl_loss, use_kl_in_reward, loss_mode=dpo, or reward.prime",
        ),
        _Rule(
            (f"{REF}.fsdp_config.param_offload",),
            lambda config: not uses_policy_as_reference(config) or config.reward.prime.enable,
            f"with an adapter the reference is the policy itself; set {ACTOR}.fsdp_config.param_offload",
        ),
        _Rule(
            ("reward",),
            scores_responses,
            "nothing is scored: distillation.use_task_rewards=false, and there are no data.val_files",
        ),
        _Rule(
            (
                *("algorithm.adv_estimator", "algorithm.gamma", "algorithm.lam", "algorithm.norm_adv_by_std_in_grpo"),
                *("algorithm.reward_components", "algorithm.component_weights", "algorithm.gigpo"),
                *("critic", "trainer.critic_warmup", "reward.overlong_buffer"),
            ),
            uses_task_rewards,
            "distillation.use_task_rewards=false: the policy learns from the teacher alone",
        ),
        _Rule(
            ("reward.memory_mb", "reward.num_workers", "reward.batch_size", "reward.reward_manager.name"),
            uses_reward_function,
            "only the reward model scores, no function",
        ),
        _Rule(("reward.reward_model.weight",), uses_reward_function, "the reward model is the only reward"),
        _Rule(
            ("reward.sandbox", "reward.code"),
            may_score_code,
            "only verl.rewards.scorers.code runs programs, and it is not used here",
        ),
    ),
    SftConfig: (
        _for_section("fsdp_config", "model"),
        _for_section("megatron", "model"),
        _Rule(
            ("trainer.faults.max_engine_restarts", "trainer.deadlines.generation", "trainer.deadlines.weights"),
            lambda config: False,
            "supervised training has no rollout engines",
        ),
    ),
}


def find_ignored_settings(config: Section) -> Iterator[str]:
    """Yield every setting that is given but has no effect, with the first reason."""
    for key, setting in collect_settings(type(config)).items():
        if setting.section is None and _is_given(config, setting) and (reason := find_unmet_condition(config, key)):
            yield f"{key}={format_value(get_value(config, key))} has no effect: {reason}"


def find_unmet_condition(config: Section, key: str) -> str | None:
    """Return the first reason why the setting has no effect in this run; None if it has one."""
    for rule in _RULES[type(config)]:
        if f"{key}.".startswith(tuple(f"{name}." for name in rule.settings)) and not rule.holds(config):
            return rule.reason
    for condition in collect_settings(type(config))[key].only_if:
        if (reason := condition.find_reason(*(get_value(config, other) for other in condition.keys))) is not None:
            return reason
    return None


def _is_given(config: Section, setting: Setting) -> bool:
    if is_overridden(config, setting.key):
        return True
    section = get_path(config, setting.path[:-1])
    listed = section.model_fields_set
    is_off = not setting.default or setting.default == -1
    return setting.path[-1] in listed and not is_off and not listed.issuperset(type(section).model_fields)
