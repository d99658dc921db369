"""Settings for the eye: all of them as YAML with their documentation, or one of them in full."""

from __future__ import annotations

from typing import Any

import yaml

from verl.config.aliases import canonical_path
from verl.config.paths import declared, key_of, look_up, nearest, written
from verl.config.run_types import TRAIN, AnyRunType
from verl.config.schema import MISSING, Section, Setting, settings_of
from verl.errors import ConfigError
from verl.redaction import redacted

__all__ = ["describe", "documentation", "render", "type_in_words"]

_COLUMN = 52
"""Where the comments start, if the value leaves room."""


def render(config: Section) -> str:
    """The settings as YAML that can be loaded again, but for secrets, which are hidden. Comments document each, and
    mark what differs from its default."""
    lines: list[str] = []
    for setting in settings_of(type(config)).values():
        indent = "  " * (len(setting.path) - 1)
        value = look_up(config, setting.path)
        if setting.section is not None:
            if not indent:
                lines.append("")
            lines.append(_comment(f"{indent}{setting.path[-1]}:", _marks(setting) + setting.doc))
            extra: dict[str, Any] = value.model_extra or {}
            lines += [f"{indent}  {name}: {_yaml(redacted(item, name))}" for name, item in extra.items()]
            continue
        changed = "" if value == setting.default else f"[changed from {written(setting.default)}] "
        required = "[required] " if value == MISSING else ""
        text = changed + required + _marks(setting) + documentation(setting)
        lines.append(_comment(f"{indent}{setting.path[-1]}: {_yaml(redacted(value, setting.key))}", text))
    return "\n".join(lines).lstrip("\n") + "\n"


def describe(key: str, kind: AnyRunType = TRAIN) -> str:
    """All that is declared about a setting, or the settings of a section; second spellings are understood."""
    path = canonical_path(tuple(key.split(".")), kind.spellings)
    setting = declared(path, kind.root)
    if setting is None:
        near = nearest(key_of(path), root=kind.root)
        raise ConfigError([f"{key}: is not a setting; " + (f"the nearest is {near}" if near else "try `verl config`")])
    if setting.section is None:
        return _in_full(setting, kind)
    below = [found for found in settings_of(kind.root).values() if found.key.startswith(f"{setting.key}.")]
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


def _in_full(setting: Setting, kind: AnyRunType) -> str:
    lines = [setting.key, f"  {setting.doc}", f"  type:    {type_in_words(setting)}"]
    lines.append("  default: " + ("none, it is required" if setting.required else written(setting.default)))
    if setting.unit:
        lines.append(f"  unit:    {setting.unit}")
    also = [short for short, full in kind.spellings.keys.items() if full == setting.key]
    if also:
        lines.append(f"  also:    {', '.join(also)}")
    if setting.planned is True or setting.roof is not None:
        lines.append("  Not built yet: only the default is accepted.")
    elif setting.planned:
        lines.append("  * not built yet")
    return "\n".join(lines) + "\n"


def _marks(setting: Setting) -> str:
    return "[not built yet] " if setting.planned is True and setting.roof is None else ""


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
