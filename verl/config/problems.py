"""What a check of the settings finds, and how the checks look at settings."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.paths import get_path
from verl.config.schema import Config, Section, collect_settings

__all__ = ["ACTOR", "REF", "ROLLOUT", "ConfigProblem", "get_value", "is_overridden", "list_keys_below", "prefix_keys"]

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """What was found, and the settings that it rests on: if one of them is wrong in itself, this is not said."""

    keys: tuple[str, ...]
    text: str


def prefix_keys(section: str, *names: str) -> tuple[str, ...]:
    """The keys of these settings of a section."""
    return tuple(f"{section}.{name}" for name in names)


def list_keys_below(section: str, root: type[Section] = Config) -> tuple[str, ...]:
    """The keys of all settings of a section, those of the sections in it too."""
    known = collect_settings(root).values()
    return tuple(found.key for found in known if found.section is None and found.key.startswith(f"{section}."))


def get_value(config: Section, key: str) -> object:
    return get_path(config, tuple(key.split(".")))


def is_overridden(config: Section, key: str) -> bool:
    """Whether the setting has another value than its default."""
    setting = collect_settings(type(config))[key]
    return setting.section is None and get_value(config, key) != setting.default
