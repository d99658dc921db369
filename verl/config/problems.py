"""What a check of the settings finds, and how the checks look at settings."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.paths import look_up
from verl.config.schema import Config, Section, settings_of

__all__ = ["ACTOR", "REF", "ROLLOUT", "ConfigProblem", "changed", "keys_below", "keys_of", "value_of"]

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """What was found, and the settings that it rests on: if one of them is wrong in itself, this is not said."""

    keys: tuple[str, ...]
    text: str


def keys_of(section: str, *names: str) -> tuple[str, ...]:
    """The keys of these settings of a section."""
    return tuple(f"{section}.{name}" for name in names)


def keys_below(section: str, root: type[Section] = Config) -> tuple[str, ...]:
    """The keys of all settings of a section, those of the sections in it too."""
    known = settings_of(root).values()
    return tuple(found.key for found in known if found.section is None and found.key.startswith(f"{section}."))


def value_of(config: Section, key: str) -> object:
    return look_up(config, tuple(key.split(".")))


def changed(config: Section, key: str) -> bool:
    """Whether the setting has another value than its default."""
    setting = settings_of(type(config))[key]
    return setting.section is None and value_of(config, key) != setting.default
