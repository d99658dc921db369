"""Declared types of the arguments of tools, for formats that write arguments as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.formats.reader import UnreadableCallError, load_json

Tools = Sequence[Mapping[str, Any]]
_TYPE_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def convert_argument(tools: Tools, tool: str, argument: str, text: str) -> Any:
    """Return the value that `text` stands for; the text itself where no type is declared or none fits."""
    types = _list_types(_get_mapping(_find_function(tools, tool), "parameters"), argument)
    if types <= {"string"}:
        return text
    word = text.strip().lower()
    if "null" in types and word in ("null", "none"):  # Qwen3-Coder's template writes them as Python does.
        return None
    if "boolean" in types and word in ("true", "false"):
        return word == "true"
    try:
        value = load_json(text)
    except UnreadableCallError:
        return text
    if "integer" in types and isinstance(value, float) and value.is_integer():
        return int(value)
    name = _TYPE_NAMES[type(value)]
    return value if name in types or (name == "integer" and "number" in types) else text


def _list_types(parameters: Mapping[str, Any], argument: str) -> set[str]:
    """Return the declared types of an argument, also where its schema refers to others."""
    types: set[str] = set()
    followed: set[str] = set()  # schemas may refer to themselves
    pending: list[Any] = [_get_mapping(parameters, "properties").get(argument)]
    while pending:
        schema = pending.pop()
        if not isinstance(schema, Mapping):
            continue
        declared = schema.get("type")
        types.update(each for each in _to_list(declared) or [declared] if isinstance(each, str))
        values = [schema["const"]] if "const" in schema else _to_list(schema.get("enum"))
        types.update(_TYPE_NAMES[type(value)] for value in values if type(value) in _TYPE_NAMES)
        for key in ("anyOf", "oneOf", "allOf"):
            pending += _to_list(schema.get(key))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            group, _, name = reference.removeprefix("#/").partition("/")
            pending.append(_get_mapping(parameters, group).get(name))
    return types


def has_tool(tools: Tools, name: Any) -> bool:
    return bool(_find_function(tools, name))


def _find_function(tools: Tools, name: Any) -> Mapping[str, Any]:
    """Return the description of a function, which may be wrapped as in a chat completion request; {} if unknown."""
    functions = (_get_mapping(tool, "function") or tool for tool in tools)
    return next((function for function in functions if function.get("name") == name), {})


def _get_mapping(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, Mapping) else {}


def _to_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
