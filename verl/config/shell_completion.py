"""Completion of settings on the command line, from the schema."""

from __future__ import annotations

from verl.config.load import AnyRunType
from verl.config.schema import Setting, collect_settings


def complete_setting(text: str, run_type: AnyRunType, *, end: str = "=") -> list[str]:
    """Return what `text` may become: the next part of a key, or `key=value` for settings with few values.

    Args:
        text: The beginning of an override, `+` and `~` included.
        run_type: The run type whose settings are completed.
        end: What follows a complete key.
    """
    prefix = text[: len(text) - len(text.lstrip("+~"))]
    key, equals, value = text[len(prefix) :].partition("=")
    settings = collect_settings(run_type.root)
    if equals:
        setting = settings.get(key)
        return [f"{prefix}{key}={each}" for each in _list_values(setting) if each.startswith(value)]
    parent = key.rpartition(".")[0]
    return [
        f"{prefix}{setting.key}{_suffix(setting, end)}"
        for setting in settings.values()
        if ".".join(setting.path[:-1]) == parent and setting.key.startswith(key)
    ]


def _suffix(setting: Setting, end: str) -> str:
    return "." if setting.section is not None else end


def _list_values(setting: Setting | None) -> list[str]:
    """Return the values of a setting that takes one of a few; empty for all others."""
    if setting is None or setting.section is not None:
        return []
    values = [str(choice) for choice in setting.choices if choice not in setting.planned]
    names = setting.type_name.split(" | ")
    return [*values, *(["true", "false"] if "true or false" in names else []), *(["null"] if "null" in names else [])]
