"""Rendering settings for `verl config`: all of them as documented YAML, or the description of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from verl.config.load import TRAIN, AnyRunType
from verl.config.paths import (
    Tree,
    find_setting,
    format_value,
    get_path,
    is_overridden,
    join_path,
    set_path,
    suggest_key,
)
from verl.config.schema import MISSING, Section, Setting, collect_settings
from verl.config.search import search_settings, suggest_word
from verl.errors import ConfigError
from verl.redaction import redact_settings

_COLUMN = 52
"""Column of the comments."""


def render(config: Section, *, only_changed: bool = False, origins: Mapping[str, str] | None = None) -> str:
    """Return the settings as YAML that can be loaded again, except for secrets, which are hidden.

    Comments document each setting and mark values that differ from the default.

    Args:
        config: The settings.
        only_changed: Omit settings that have their default.
        origins: The origins of given settings, to be named in the comments instead.
    """
    lines: list[str] = []
    shown = list_changed(config) if only_changed else None
    for setting in collect_settings(type(config)).values():
        if shown is not None and not any(f"{key}.".startswith(f"{setting.key}.") for key in shown):
            continue
        indent = "  " * (len(setting.path) - 1)
        value = get_path(config, setting.path)
        if setting.section is not None:
            if not indent:
                lines.append("")
            title = f"{indent}{setting.path[-1]}:"
            lines.append(title if origins is not None else _comment(title, setting.doc))
            for name, item in (value.model_extra or {}).items():
                entry = f"{indent}  {name}: {_yaml(redact_settings(item, name))}"
                lines.append(
                    entry if origins is None else _comment(entry, _find_origin(origins, f"{setting.key}.{name}"))
                )
            continue
        text = _explain(setting, value) if origins is None else _find_origin(origins, setting.key)
        lines.append(_comment(f"{indent}{setting.path[-1]}: {_yaml(redact_settings(value, setting.key))}", text))
    return "\n".join(lines).lstrip("\n") + "\n"


def render_json(config: Section, *, only_changed: bool = False, origins: Mapping[str, str] | None = None) -> Tree:
    """Return the settings as a tree for JSON, with secrets hidden.

    With `origins`, the tree is flat: each key has its value and its origin.
    """
    tree = redact_settings(config.model_dump(mode="json"))
    keys = list_changed(config) if only_changed else _list_keys(config)
    result: Tree = {}
    for key in keys:
        path = tuple(key.split("."))
        value = get_path(tree, path)
        if origins is None:
            set_path(result, path, value)
        else:
            result[key] = {"value": value, "origin": _find_origin(origins, key)}
    return result


def _find_origin(origins: Mapping[str, str], key: str) -> str:
    """Return the origin of a setting, or all origins of the entries of a dictionary."""
    given = dict.fromkeys(origin for name, origin in origins.items() if f"{name}.".startswith(f"{key}."))
    return "; ".join(given) or "default"


def list_changed(config: Section) -> list[str]:
    """Return the keys of the settings that differ from their defaults, entries of open sections included."""
    defaults = collect_settings(type(config))
    return [key for key in _list_keys(config) if key not in defaults or is_overridden(config, key)]


def _list_keys(config: Section) -> Iterator[str]:
    for setting in collect_settings(type(config)).values():
        if setting.section is None:
            yield setting.key
        else:
            section = get_path(config, setting.path)
            yield from (f"{setting.key}.{name}" for name in section.model_extra or {})


def _explain(setting: Setting, value: Any) -> str:
    marker = "" if value == setting.default else f"[changed from {format_value(setting.default)}] "
    required = "[required] " if value == MISSING else ""
    return marker + required + document(setting)


def describe(key: str, run_type: AnyRunType = TRAIN) -> str:
    """Return the full description of a setting, or a list of the settings of a section.

    `key` may be an alias. Anything else is searched in names and descriptions.
    """
    path = run_type.legacy.resolve_alias(tuple(key.split(".")))
    setting = find_setting(path, run_type.root)
    if setting is None and (rule := run_type.legacy.find_rule(path)) is not None:
        what = {"always on": "always on: ", "ignored": "ignored: ", "needs": "not supported yet: "}[rule.kind]
        return f"{key}\n  A key of other launch scripts, {what}{rule.text}\n"
    if setting is None and (found := search_settings(key, run_type)):
        return _describe_list(f"{key}: in the name or description of {len(found)} settings", found)
    if setting is None:
        near = suggest_key(join_path(path), run_type.root) or suggest_word(key, run_type)
        fix = f"did you mean {near}?" if near else "run `verl config` to list them"
        raise ConfigError([f"{key}: is not a setting, and no name or description has it; {fix}"])
    if setting.section is None:
        return _describe_setting(setting, run_type)
    settings = collect_settings(run_type.root).values()
    below = [child for child in settings if child.section is None and child.key.startswith(f"{setting.key}.")]
    return _describe_list(f"{setting.key}: {setting.doc}", below)


def _describe_list(title: str, settings: Sequence[Setting]) -> str:
    width = max(len(setting.key) for setting in settings)
    rows = [f"  {setting.key:<{width}}  {document(setting)}" for setting in settings]
    return "\n".join([title, *rows]) + "\n"


def describe_type(setting: Setting) -> str:
    """Return the type in words; values that are not supported yet are marked with a star."""
    if not setting.choices:
        return setting.type_name
    return " | ".join(f"{part}*" if part in setting.planned else part for part in setting.type_name.split(" | "))


def _describe_setting(setting: Setting, run_type: AnyRunType) -> str:
    lines = [setting.key, f"  {setting.doc}", f"  type:    {describe_type(setting)}"]
    lines.append("  default: " + ("none, required" if setting.required else format_value(setting.default)))
    if setting.unit:
        lines.append(f"  unit:    {setting.unit}")
    also = [short for short, full in run_type.legacy.aliases.items() if full == setting.key]
    if also:
        lines.append(f"  also:    {', '.join(also)}")
    if setting.planned:
        lines.append("  * not supported yet")
    return "\n".join(lines) + "\n"


def document(setting: Setting) -> str:
    """Return the one-line documentation of a setting, with its unit."""
    return f"{setting.doc.removesuffix('.')} ({setting.unit})." if setting.unit else setting.doc


def _comment(line: str, text: str) -> str:
    return f"{line:<{_COLUMN}}  # {text}"


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()
