"""Settings for the eye: all of them as YAML with their documentation, or one of them in full."""

from __future__ import annotations

from typing import Any

import yaml

from verl.config.aliases import resolve_alias
from verl.config.paths import find_setting, format_value, get_path, join_path, suggest_key
from verl.config.run_types import TRAIN, AnyRunType
from verl.config.schema import MISSING, Section, Setting, collect_settings
from verl.errors import ConfigError
from verl.redaction import redacted

__all__ = ["describe", "documentation", "render", "type_in_words"]

_COLUMN = 52
"""Where the comments start, if the value leaves room."""


def render(config: Section) -> str:
    """The settings as YAML that can be loaded again, but for secrets, which are hidden. Comments document each, and
    mark what differs from its default."""
    lines: list[str] = []
    for setting in collect_settings(type(config)).values():
        indent = "  " * (len(setting.path) - 1)
        value = get_path(config, setting.path)
        if setting.section is not None:
            if not indent:
                lines.append("")
            lines.append(_comment(f"{indent}{setting.path[-1]}:", _marks(setting) + setting.doc))
            extra: dict[str, Any] = value.model_extra or {}
            lines += [f"{indent}  {name}: {_yaml(redacted(item, name))}" for name, item in extra.items()]
            continue
        is_overridden = "" if value == setting.default else f"[changed from {format_value(setting.default)}] "
        required = "[required] " if value == MISSING else ""
        text = is_overridden + required + _marks(setting) + documentation(setting)
        lines.append(_comment(f"{indent}{setting.path[-1]}: {_yaml(redacted(value, setting.key))}", text))
    return "\n".join(lines).lstrip("\n") + "\n"


def describe(key: str, run_type: AnyRunType = TRAIN) -> str:
    """All that is declared about a setting, or the settings of a section; second spellings are understood."""
    path = resolve_alias(tuple(key.split(".")), run_type.aliases)
    setting = find_setting(path, run_type.root)
    if setting is None:
        near = suggest_key(join_path(path), root=run_type.root)
        raise ConfigError([f"{key}: is not a setting; " + (f"the nearest is {near}" if near else "try `verl config`")])
    if setting.section is None:
        return _in_full(setting, run_type)
    below = [found for found in collect_settings(run_type.root).values() if found.key.startswith(f"{setting.key}.")]
    width = max(len(found.key) for found in below if found.section is None)
    rows = [
        f"  {found.key:<{width}}  {_marks(found)}{documentation(found)}" for found in below if found.section is None
    ]
    return "\n".join([f"{setting.key}: {setting.doc}", *rows]) + "\n"


def type_in_words(setting: Setting) -> str:
    """The type in words, with the values that are not built yet marked by a star."""
    planned = setting.planned if isinstance(setting.planned, tuple) else ()
    if not setting.choices:
        return setting.type_name
    return " | ".join(f"{part}*" if part in planned else part for part in setting.type_name.split(" | "))


def _in_full(setting: Setting, run_type: AnyRunType) -> str:
    lines = [setting.key, f"  {setting.doc}", f"  type:    {type_in_words(setting)}"]
    lines.append("  default: " + ("none, it is required" if setting.required else format_value(setting.default)))
    if setting.unit:
        lines.append(f"  unit:    {setting.unit}")
    also = [short for short, full in run_type.aliases.keys.items() if full == setting.key]
    if also:
        lines.append(f"  also:    {', '.join(also)}")
    if setting.planned is True or setting.planned_parent is not None:
        lines.append("  Not built yet: only the default is accepted.")
    elif setting.planned:
        lines.append("  * not built yet")
    return "\n".join(lines) + "\n"


def _marks(setting: Setting) -> str:
    return "[not built yet] " if setting.planned is True and setting.planned_parent is None else ""


def documentation(setting: Setting) -> str:
    """The one line about a setting, with its unit."""
    return f"{setting.doc.removesuffix('.')} ({setting.unit})." if setting.unit else setting.doc


def _comment(line: str, text: str) -> str:
    return f"{line:<{_COLUMN}}  # {text}"


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()
