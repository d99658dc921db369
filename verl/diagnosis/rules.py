"""All rules, in the order in which a run gives their advice."""

from __future__ import annotations

from verl.diagnosis import device_rules, engine_rules, policy_rules, response_rules, reward_rules
from verl.diagnosis.rule import Rule

TOPICS: dict[str, tuple[Rule, ...]] = {
    "Rewards": (
        reward_rules.NO_SIGNAL,
        reward_rules.UNSCORED_EPISODES,
        reward_rules.REWARD_OUTLIER,
        reward_rules.REWARD_HACKING,
        reward_rules.SCORING_ERRORS,
    ),
    "Devices and memory": (
        device_rules.IDLE_TRAINER,
        device_rules.IDLE_GENERATION,
        device_rules.SLOW_RANK,
        device_rules.MEMORY_GROWTH,
    ),
    "Engines": (engine_rules.ENGINE_MISMATCH, engine_rules.KV_PREEMPTION),
    "Policy": (
        policy_rules.KL_EXPLOSION,
        policy_rules.SKIPPED_STEPS,
        policy_rules.ENTROPY_COLLAPSE,
        policy_rules.GRADIENT_DRIFT,
    ),
    "Responses": (
        response_rules.TRUNCATED_RESPONSES,
        response_rules.DEGENERATE_RESPONSES,
        response_rules.LENGTH_EXPLOSION,
    ),
}

RULES = tuple(rule for rules in TOPICS.values() for rule in rules)


def find_rule(name: str) -> Rule | None:
    """Return the rule of a name, in which spaces may stand for hyphens."""
    wanted = name.casefold().replace(" ", "-")
    return next((rule for rule in RULES if rule.name == wanted), None)
