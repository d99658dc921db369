"""Tool calls as models write them in each format, to be read by `verl.agents.formats`."""

import json
from collections.abc import Callable

from verl.agents.formats.tool_calls import ToolCall


def format_call(name: str, call: ToolCall) -> str:
    """Return a call as a model with the format `name` writes it."""
    return WRITERS[name](call)


def write_qwen3_coder(call: ToolCall) -> str:
    parameters = (f"<parameter={key}>\n{to_text(value)}\n</parameter>\n" for key, value in call.arguments.items())
    return f"<tool_call>\n<function={call.name}>\n{''.join(parameters)}</function>\n</tool_call>"


def write_glm(call: ToolCall) -> str:
    arguments = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{to_text(value)}</arg_value>\n" for key, value in call.arguments.items()
    )
    return f"<tool_call>{call.name}\n{''.join(arguments)}</tool_call>"


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def to_text(value: object) -> str:
    return value if isinstance(value, str) else to_json(value)


WRITERS: dict[str, Callable[[ToolCall], str]] = {
    "hermes": lambda call: f"<tool_call>\n{to_json({'name': call.name, 'arguments': call.arguments})}\n</tool_call>",
    "qwen3_coder": write_qwen3_coder,
    "llama3_json": lambda call: to_json({"name": call.name, "parameters": call.arguments}),
    "gpt-oss": lambda call: (
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{to_json(call.arguments)}<|call|>"
    ),
    "glm": write_glm,
    "deepseek": lambda call: (  # as V3.1 writes it
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{to_json(call.arguments)}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi": lambda call: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{call.name}:0<|tool_call_argument_begin|>"
        f"{to_json(call.arguments)}<|tool_call_end|><|tool_calls_section_end|>"
    ),
}
