"""Problems that the validation of settings reports, and access to settings by key."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.paths import get_path
from verl.config.schema import Section, collect_settings

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """A problem, and the settings it depends on: if one of them is itself invalid, the problem is not reported."""

    keys: tuple[str, ...]
    text: str

    @classmethod
    def at(cls, key: str, text: str, *other_keys: str) -> ConfigProblem:
        """A problem of the setting `key`, named first in its text."""
        return cls((key, *other_keys), f"{key}: {text}")


def get_value(config: Section, key: str) -> object:
    """Return the value of a setting by its dotted key."""
    return get_path(config, tuple(key.split(".")))


def is_overridden(config: Section, key: str) -> bool:
    """Whether the setting has a value other than its default."""
    setting = collect_settings(type(config))[key]
    return setting.section is None and get_value(config, key) != setting.default
