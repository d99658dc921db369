"""Chat messages in OpenAI's form, as agents write them, and in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def prepare_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them.

    Content is text instead of a list of parts, the arguments of calls are objects instead of JSON, results have the
    names of their tools, and the role "developer" is mapped to "system".
    """
    names: dict[Any, str] = {}
    prepared = []
    for each in messages:
        message = {key: value for key, value in each.items() if value is not None}
        content = join_text(message.get("content"))
        message["content"] = replace_surrogates(content) if isinstance(content, str) else content
        if message["role"] == "developer":
            message["role"] = "system"
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_read_call(call) for call in calls]
            names |= {call.get("id"): call["function"]["name"] for call in calls}
        if message["role"] == "tool" and (name := names.get(message.get("tool_call_id"))):
            message.setdefault("name", name)
        prepared.append(message)
    return prepared


def _read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = read_json(call["function"].get("arguments"))
    function = {**call["function"], "arguments": {} if arguments in (None, "") else arguments}
    return {**call, "function": function}


def join_text(content: Any) -> Any:
    """Return content as text; OpenAI's SDKs also send lists of parts."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content)
    return content or ""


def replace_surrogates(text: str) -> str:
    """Return text that can be encoded: JSON allows lone surrogates, tokenizers do not."""
    return text.encode(errors="replace").decode()


def read_json(arguments: Any) -> Any:
    """Return the value of JSON text; return anything else unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
