"""The settings as a JSON schema, with which editors complete and check YAML files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import yaml
from pydantic import TypeAdapter

from verl.config.load import TRAIN, AnyRunType
from verl.config.render import document
from verl.config.schema import Setting, collect_settings

Node = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The version of JSON Schema that YAML plugins of editors read."""

_INTERPOLATION: Node = {"type": "string", "pattern": r"\$\{|^\?\?\?$", "description": "${section.key}, or ???"}
_LIST_OF_HYDRA = "Files and config groups that Hydra reads first."


def build_schema(run_type: AnyRunType = TRAIN) -> Node:
    """Return the JSON schema of YAML files with settings of a run type.

    It has the names, types, values, limits, defaults and documentation of all settings, and their aliases. Conditions
    between settings are not part of it, nor are required settings, which may be given on the command line.
    """
    root = _describe_object({}, is_open=False)
    for setting in collect_settings(run_type.root).values():
        parent = _find(root, setting.path[:-1])
        parent["properties"][setting.path[-1]] = _describe(setting, run_type.legacy.value_aliases.get(setting.key, {}))
    for alias, key in sorted(run_type.legacy.aliases.items()):  # a section before the aliases in it
        _add_alias(root, tuple(alias.split(".")), tuple(key.split(".")))
    root["properties"] |= {"defaults": {"type": "array", "description": _LIST_OF_HYDRA}, "hydra": {}}
    head = {"$schema": DRAFT, "title": f"Settings of verl {run_type.command}"}
    return {**head, **root, "$defs": {"interpolation": _INTERPOLATION}}


def _describe(setting: Setting, value_aliases: Mapping[str, Any]) -> Node:
    text = document(setting)
    if setting.section is not None:
        return {**_describe_object({}, is_open=setting.open), "description": text}
    field = setting.owner.model_fields[setting.path[-1]]
    annotation: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    kind = _simplify(TypeAdapter(annotation).json_schema(), setting.planned, value_aliases)
    kinds = [*(kind.pop("anyOf", None) or [kind]), {"$ref": "#/$defs/interpolation"}]
    if others := [yaml.safe_load(alias) for alias, value in value_aliases.items() if value not in setting.choices]:
        kinds.append({"enum": others})
    default = {} if setting.required else {"default": _plain(setting.default)}
    return {"anyOf": kinds, "description": text, **default}


def _describe_object(properties: Node, *, is_open: bool) -> Node:
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": is_open}


def _simplify(node: Any, refused: tuple[Any, ...], aliases: Mapping[str, Any]) -> Any:
    """Return a schema of pydantic in draft 7, with the aliases of its values, and without those that are refused.

    Texts may be given as numbers, as `Section` accepts them.
    """
    if isinstance(node, list):
        return [_simplify(item, refused, aliases) for item in node]
    if not isinstance(node, dict):
        return node
    simple = {name: _simplify(value, refused, aliases) for name, value in node.items() if name != "title"}
    if "enum" in simple:
        values = [value for value in simple["enum"] if value not in refused]
        others = [yaml.safe_load(alias) for alias, value in aliases.items() if value in values]
        return {"enum": [*values, *others]}
    if simple.get("type") == "string" and "pattern" not in simple:
        simple["type"] = ["string", "number"]
    if "prefixItems" in simple:
        simple["items"] = simple.pop("prefixItems")
    return simple


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _find(root: Node, path: tuple[str, ...]) -> Node:
    for name in path:
        root = root["properties"][name]
    return root


def _add_alias(root: Node, alias: tuple[str, ...], target: tuple[str, ...]) -> None:
    """Accept `alias` for what is at `target`, unless one of them is an entry of an open dictionary."""
    parent = root
    for name in alias[:-1]:
        node = parent["properties"].setdefault(name, _describe_object({}, is_open=False))
        if "allOf" in node:  # an alias of a section, in which this is one more name
            section = _find(root, tuple(node["allOf"][0]["$ref"].split("/")[2::2]))
            node = parent["properties"][name] = {**section, "properties": dict(section["properties"])}
        if "properties" not in node:
            return
        parent = node
    try:
        _find(root, target)
        kind: Node = {"allOf": [{"$ref": "#/" + "/".join(f"properties/{name}" for name in target)}]}
    except KeyError:  # an entry of an open dictionary
        kind = {}
    key = ".".join(target)
    parent["properties"].setdefault(alias[-1], {**kind, "description": f"Alias of {key}."})
