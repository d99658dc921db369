"""Declared types of the arguments of tools, for formats that write arguments as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.tool_formats.scanning import UnreadableCallError, read_json, skip_space

_MAX_REFERENCES = 16  # followed in one schema; schemas may refer to themselves


class ArgumentTypes:
    """The declared types of the arguments of one tool."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], name: str) -> None:
        self._schema: Mapping[str, Any] = {}
        for tool in tools:
            function = _get_function(tool)
            if function.get("name") == name:
                self._schema = _get_mapping(function, "parameters")

    def convert(self, argument: str, text: str) -> Any:
        """Return the value that `text` stands for; the text itself where no type is declared or none fits."""
        types = self._list_types(_get_mapping(self._schema, "properties").get(argument), _MAX_REFERENCES)
        if types <= {"string"}:
            return text
        word = text.strip().lower()
        if "null" in types and word == "null":
            return None
        if "boolean" in types and word in ("true", "false"):
            return word == "true"
        try:
            value, end = read_json(text, skip_space(text, 0), "value is")
        except UnreadableCallError:
            return text
        if skip_space(text, end) < len(text):
            return text
        if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
            return int(value)
        return value if types & _get_type_names(value) else text

    def _list_types(self, schema: Any, references: int) -> set[str]:
        if not isinstance(schema, Mapping) or references == 0:
            return set()
        declared = schema.get("type")
        types = {each for each in (declared if isinstance(declared, list) else [declared]) if isinstance(each, str)}
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            types |= {sorted(names)[0] for value in values if (names := _get_type_names(value))}
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(choices := schema.get(key), list):
                types |= {each for choice in choices for each in self._list_types(choice, references - 1)}
        if isinstance(reference := schema.get("$ref"), str):
            group, _, name = reference.removeprefix("#/").partition("/")
            types |= self._list_types(_get_mapping(self._schema, group).get(name), references - 1)
        return types


def get_tool_names(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the tools in a list of schemas."""
    return {name for tool in tools if isinstance(name := _get_function(tool).get("name"), str)}


def _get_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the description of a function, which may be wrapped as in a chat completion request."""
    return _get_mapping(tool, "function") or tool


def _get_mapping(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, Mapping) else {}


def _get_type_names(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return {names[type(value)]} if type(value) in names else set()
