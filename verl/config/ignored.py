"""Report settings that are given but have no effect.

Most conditions are declared with the setting (`only_if` in `verl.config.schema`). The few that depend on which models
and functions a run uses are listed here.

A setting counts as given if its value differs from the default, or if it was written down with its default value:
`kl_coef=0.001` without a KL penalty is reported too. Two kinds of defaults are not reported, since they are no mistake:
values that turn something off (false, null, 0, -1, an empty list), and sections that are listed completely, as
`verl config` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.features import may_score_code, uses_policy_as_reference, uses_reference, uses_reward_function
from verl.config.paths import format_value, get_path
from verl.config.problems import ACTOR, REF, ConfigProblem, get_value, is_overridden
from verl.config.schema import Config, OnlyIf, Section, Setting, SftConfig, collect_settings

_SCORER = ("reward.custom_reward_function.path", "reward.functions")
_MODEL = "reward.reward_model.enable"


@dataclass(frozen=True, slots=True)
class _Rule:
    """Settings, or whole sections, that have no effect unless `holds`."""

    settings: tuple[str, ...]
    holds: Callable[[Any], bool]
    reason: str
    depends_on: tuple[str, ...] = ()

    def applies_to(self, key: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in self.settings)


_RULES: dict[type[Section], tuple[_Rule, ...]] = {
    Config: (
        _Rule(
            ("trainer.ref_update_freq", REF),
            uses_reference,
            "no reference policy is used; it requires use_kl_loss, use_kl_in_reward, loss_mode=dpo or sppo, or "
            "reward.prime",
            (
                f"{ACTOR}.use_kl_loss",
                "algorithm.use_kl_in_reward",
                f"{ACTOR}.policy_loss.loss_mode",
                "reward.prime.enable",
            ),
        ),
        _Rule(
            (f"{REF}.fsdp_config.param_offload",),
            lambda config: not uses_policy_as_reference(config) or config.reward.prime.enable,
            f"with an adapter the reference is the policy itself; set {ACTOR}.fsdp_config.param_offload",
            (f"{ACTOR}.peft.lora_rank", "trainer.ref_update_freq"),
        ),
        _Rule(
            ("reward.memory_mb", "reward.num_workers", "reward.batch_size", "reward.reward_manager.name"),
            uses_reward_function,
            "only the reward model scores, no function",
            (_MODEL, *_SCORER),
        ),
        _Rule(("reward.reward_model.weight",), uses_reward_function, "the reward model is the only reward", _SCORER),
        _Rule(
            ("reward.sandbox", "reward.code"),
            may_score_code,
            "only verl.rewards.scorers.code runs programs, and it is not used here",
            _SCORER,
        ),
    ),
    SftConfig: (
        _Rule(
            ("trainer.faults.max_engine_restarts", "trainer.deadlines.generation", "trainer.deadlines.weights"),
            lambda config: False,
            "supervised training has no rollout engines",
        ),
    ),
}


def find_ignored_settings(config: Section) -> Iterator[ConfigProblem]:
    """Yield every setting that is given but has no effect, with the first reason."""
    for key, setting in collect_settings(type(config)).items():
        if setting.section is None and _is_given(config, setting) and (unmet := find_unmet_condition(config, key)):
            value = format_value(get_value(config, key))
            yield ConfigProblem((key, *unmet.keys), f"{key}={value} has no effect: {unmet.reason}")


def find_unmet_condition(config: Section, key: str) -> OnlyIf | None:
    """Return the first condition of the setting that does not hold in this run; None if the setting has an effect."""
    for rule in _RULES[type(config)]:
        if rule.applies_to(key) and not rule.holds(config):
            return OnlyIf(rule.depends_on, rule.holds, rule.reason)
    for condition in collect_settings(type(config))[key].only_if:
        if not condition.holds(*(get_value(config, other) for other in condition.keys)):
            return condition
    return None


def _is_given(config: Section, setting: Setting) -> bool:
    if is_overridden(config, setting.key):
        return True
    section = get_path(config, setting.path[:-1])
    listed = section.model_fields_set
    is_off = not setting.default or setting.default == -1
    return setting.path[-1] in listed and not is_off and not listed.issuperset(type(section).model_fields)
