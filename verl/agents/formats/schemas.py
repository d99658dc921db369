"""Declared types of the arguments of tools, for formats that write arguments as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.formats.reader import UnreadableCallError, load_json

_TYPE_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


class ArgumentTypes:
    """The declared types of the arguments of one tool."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], name: str) -> None:
        functions = (_get_function(tool) for tool in tools)
        function = next((function for function in functions if function.get("name") == name), {})
        self._schema = _get_mapping(function, "parameters")

    def convert(self, argument: str, text: str) -> Any:
        """Return the value that `text` stands for; the text itself where no type is declared or none fits."""
        types = self._list_types(argument)
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

    def _list_types(self, argument: str) -> set[str]:
        types: set[str] = set()
        followed: set[str] = set()  # schemas may refer to themselves
        pending: list[Any] = [_get_mapping(self._schema, "properties").get(argument)]
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
                pending.append(_get_mapping(self._schema, group).get(name))
        return types


def get_tool_names(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the names of the tools in a list of schemas."""
    return [_get_function(tool).get("name") for tool in tools]


def _get_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the description of a function, which may be wrapped as in a chat completion request."""
    return _get_mapping(tool, "function") or tool


def _get_mapping(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, Mapping) else {}


def _to_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
