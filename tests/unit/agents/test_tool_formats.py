"""Calls are read as they were written, whatever they contain; broken ones are reported, and nothing raises."""

import json
from collections.abc import Sequence
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_call_texts import format_call

from verl.agents.formats import FORMATS, detect_format
from verl.agents.formats.tool_calls import ParsedReply, ToolCall

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

TAGGED = ("qwen3_coder", "glm")  # write arguments as plain text
THINKING = [name for name in FORMATS if name != "gpt-oss"]  # which has a channel for its reasoning
WEATHER = ToolCall("get_weather", {"city": "Oslo", "days": "3"})

every_format = pytest.mark.parametrize("name", FORMATS)


def declare(function: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": function, "parameters": parameters}}


# --- What is written is read ---

TRICKY = [
    '"',
    "\\",
    "\n",
    "\n\n",
    "{",
    "}",
    "</",
    "</think>",
    "</tool_call>",
    "<|call|>",
    "<|end|>",
    "null",
    "True",
    "é",
    "😀",
]
texts = (st.text() | st.lists(st.sampled_from(TRICKY) | st.text(max_size=3)).map("".join)).filter(
    lambda text: "parameter" not in text and "arg_" not in text  # the tags that an argument cannot contain
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": texts,
    "integer": st.integers(),
    "number": numbers | st.integers(),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(json_values, max_size=3),
    "object": st.dictionaries(texts, json_values, max_size=3),
}
tool_names = st.from_regex(r"[A-Za-z_][\w.-]{0,12}", fullmatch=True)
prose = st.text(st.characters(exclude_characters="<{;", exclude_categories=["Cs"]), max_size=20)


@st.composite
def calls_with_schemas(draw: st.DrawFn, name: str) -> tuple[list[ToolCall], list[dict[str, Any]]]:
    """Return calls that the format can express, and the schemas of their tools."""
    keys = st.from_regex(r"[A-Za-z_]\w{0,8}", fullmatch=True) if name in TAGGED else texts
    calls, schemas = [], []
    for function in draw(st.lists(tool_names, min_size=1, max_size=3, unique=True)):
        types = draw(st.dictionaries(keys, st.sampled_from(list(VALUES)), max_size=4))
        calls.append(ToolCall(function, {key: draw(VALUES[type_name]) for key, type_name in types.items()}))
        schemas.append(declare(function, {key: {"type": type_name} for key, type_name in types.items()}))
    return calls, schemas


def say(name: str, text: str) -> str:
    """Return text as the model writes it before or after a call."""
    return f"<|channel|>final<|message|>{text}<|end|><|start|>assistant" if name == "gpt-oss" else text


def join_content(name: str, parts: Sequence[str]) -> str:
    return "\n".join(filter(None, parts)) if name == "gpt-oss" else "".join(parts).strip()


@every_format
@settings(max_examples=50)
@given(data=st.data())
def test_calls_are_read_as_they_were_written(name: str, data: st.DataObject) -> None:
    calls, schemas = data.draw(calls_with_schemas(name))
    parts = [data.draw(prose) for _ in range(len(calls) + 1)]
    text = say(name, parts[0])
    for call, part in zip(calls, parts[1:], strict=True):
        text += format_call(name, call) + say(name, part)
    reply = FORMATS[name](text, schemas)
    assert reply == ParsedReply(join_content(name, parts), tuple(calls))
    # Equality of Python takes True for 1, and 1.0 for 1.
    assert json.dumps([call.arguments for call in reply.calls]) == json.dumps([call.arguments for call in calls])


@every_format
@settings(max_examples=30)
@given(text=prose)
def test_text_without_calls_is_content_as_it_is(name: str, text: str) -> None:
    assert FORMATS[name](text) == ParsedReply(text if name != "gpt-oss" or text.strip() else "", ())


ARGUMENTS = '{"city": "Oslo", "days": "3"}'
VARIANTS = {
    "hermes, on one line, keys in the other order": (
        "hermes",
        f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "get_weather"}}</tool_call>',
    ),
    "hermes, arguments encoded twice": (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>',
    ),
    "qwen3_coder, without the outer tags": (
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>",
    ),
    "qwen3_coder, without line breaks": (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Oslo</parameter><parameter=days>3</parameter></function>"
        "</tool_call>",
    ),
    "glm, without line breaks as in 4.7": (
        "glm",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
    ),
    "llama, after a tag": ("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}'),
    "llama, with a type, and arguments": (
        "llama3_json",
        f'{{"type": "function", "name": "get_weather", "arguments": {ARGUMENTS}}}',
    ),
    "llama, keys in the other order": ("llama3_json", f'{{"parameters": {ARGUMENTS}, "name": "get_weather"}}'),
    "gpt-oss, the recipient in the role": (
        "gpt-oss",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
    ),
    "gpt-oss, in the reasoning, without the token that ends the turn": (
        "gpt-oss",
        f"<|channel|>analysis to=functions.get_weather<|message|>{ARGUMENTS}",
    ),
    "deepseek, V3 and R1": (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek, a section that does not end": (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
    ),
    "kimi, with line breaks, and without its prefix": (
        "kimi",
        "<|tool_calls_section_begin|>\n<|tool_call_begin|>get_weather:12\n<|tool_call_argument_begin|>\n"
        f"{ARGUMENTS}\n<|tool_call_end|>\n<|tool_calls_section_end|>",
    ),
}


@pytest.mark.parametrize(("name", "text"), VARIANTS.values(), ids=VARIANTS)
def test_variants_that_models_write_are_read(name: str, text: str) -> None:
    assert FORMATS[name](text) == ParsedReply("", (WEATHER,))


@pytest.mark.parametrize(
    ("name", "frame", "call"),
    [
        (
            "deepseek",
            "<｜tool▁calls▁begin｜>%s\n%s<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        ),
        (
            "kimi",
            "<|tool_calls_section_begin|>%s%s<|tool_calls_section_end|>",
            "<|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|><|tool_call_end|>",
        ),
    ],
)
def test_a_section_has_several_calls(name: str, frame: str, call: str) -> None:
    expected = ParsedReply("", (ToolCall("a", {}), ToolCall("b", {})))
    assert FORMATS[name](frame % (call % "a", call % "b")) == expected


def test_llama_separates_calls_with_semicolons() -> None:
    text = '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}'
    assert FORMATS["llama3_json"](text) == ParsedReply("", (ToolCall("a", {}), ToolCall("b", {})))


@pytest.mark.parametrize("text", ['{"name": "Oslo"}', '{"type": "city", "area": 454}', 'It is {"name": broken', "{}"])
def test_other_json_is_content_for_llama(text: str) -> None:
    assert FORMATS["llama3_json"](text, [declare("get_weather", {})]) == ParsedReply(text, ())


def test_the_content_of_gpt_oss_is_what_it_says_to_the_user() -> None:
    text = (
        "<|channel|>analysis<|message|>Is it <|channel|>? <|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Let me see.<|end|><|start|>assistant<|channel|>final<|message|>It rains.\nTake care. <|return|>"
    )
    assert FORMATS["gpt-oss"](text) == ParsedReply("Let me see.\nIt rains.\nTake care. ", ())


# --- Types by schema ---


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({}, "3", "3"),
        ({"type": "string"}, " true ", " true "),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "1e-05", 1e-05),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "true", "true"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, ' [1, "é"] ', [1, "é"]),
        ({"type": "array"}, "[1] [2]", "[1] [2]"),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", 3),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": 1.5}, "1.5", 1.5),
        ({"$ref": "#/$defs/Count"}, "3", 3),
        ({"$ref": "#/$defs/Loop"}, "3", 3),
        ({"$ref": "#/$defs/Missing"}, "3", "3"),
        ({"type": 7, "anyOf": 7, "enum": 7, "$ref": 7}, "3", "3"),
        ("integer", "3", "3"),
    ],
)  # fmt: skip
def test_plain_text_is_converted_to_the_declared_type(name: str, schema: Any, text: str, value: Any) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Count"}]}
    tool = declare("f", {"a": schema}, **{"$defs": {"Count": {"type": "integer"}, "Loop": loop}})
    [call] = FORMATS[name](format_call(name, ToolCall("f", {"a": text})), [declare("g", {}), tool]).calls
    assert isinstance(call, ToolCall)
    assert call.arguments == {"a": value}
    assert type(call.arguments["a"]) is type(value)


# --- Reasoning ---


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize(
    "opening", ["<think>\n", "\n<think>", ""], ids=["opened", "after a line", "opened in the prompt"]
)
def test_tool_calls_inside_reasoning_are_plain_text(name: str, opening: str) -> None:
    reasoning = f"{opening}Perhaps {format_call(name, ToolCall('other', {'a': 'b'}))} or <tool_call> or {{.</think>\n\n"
    assert FORMATS[name](reasoning + "It rains.") == ParsedReply(reasoning + "It rains.", ())
    reply = FORMATS[name](reasoning + format_call(name, WEATHER))
    assert reply == ParsedReply(reasoning.strip(), (WEATHER,))


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_that_does_not_end_has_no_calls(name: str) -> None:
    text = f"<think>Perhaps {format_call(name, WEATHER)}"
    assert FORMATS[name](text) == ParsedReply(text, ())


@every_format
def test_the_end_of_reasoning_may_be_an_argument(name: str) -> None:
    call = ToolCall("say", {"text": "</think>"})
    assert FORMATS[name](format_call(name, WEATHER) + format_call(name, call)).calls == (WEATHER, call)


def test_a_tool_call_mentioned_in_the_reasoning_of_gpt_oss_is_plain_text() -> None:
    text = (
        "<|channel|>analysis<|message|>Send to=functions.f {}?<|end|><|start|>assistant<|channel|>final<|message|>No."
    )
    assert FORMATS["gpt-oss"](text) == ParsedReply("No.", ())


# --- Detection ---

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

# How the templates of each family render calls.
TEMPLATES = {
    "hermes": """
{%- for call in calls %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
{%- endfor %}""",
    "qwen3_coder": """
{%- for call in calls %}
<tool_call>
<function={{ call.name }}>
{%- for key, value in call.arguments | items %}
<parameter={{ key }}>
{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
</parameter>
{%- endfor %}
</function>
</tool_call>
{%- endfor %}""",
    "glm": """
{%- for call in calls %}
<tool_call>{{ call.name }}
{%- for key, value in call.arguments | items %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{%- endfor %}
</tool_call>
{%- endfor %}""",
    "llama3_json": """
{%- set headers = ["<|start_header_id|>", "<|python_tag|>"] %}
{%- for call in calls -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- endfor %}""",
    "gpt-oss": """
{%- for call in calls -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- endfor %}""",
    "deepseek": """
{%- for call in calls %}
{{- "<｜tool▁calls▁begin｜>" if loop.first else "\n" }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.name }}
```json
{{ call.arguments | tojson }}
```<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜>""",
    "kimi": """<|tool_calls_section_begin|>
{%- for call in calls -%}
<|tool_call_begin|>functions.{{ call.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>
{{- call.arguments | tojson }}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>""",
}


@every_format
def test_the_format_of_a_template_reads_what_it_renders(name: str) -> None:
    assert detect_format(CHATML + TEMPLATES[name]) == name
    arguments = {"s": 'a "b"\n\n<c>', "b": True, "n": None, "i": 3, "f": 0.1, "l": [1, None], "o": {"k": False}}
    types = {"s": "string", "b": "boolean", "n": "null", "i": "integer", "f": "number", "l": "array", "o": "object"}
    calls = (ToolCall("first", arguments), ToolCall("second", {}))
    text = jinja2.Template(TEMPLATES[name]).render(calls=calls)
    tool = declare("first", {key: {"type": type_name} for key, type_name in types.items()})
    assert FORMATS[name](text, [tool]) == ParsedReply("", calls)


def test_llama_is_recognized_by_its_instructions() -> None:
    instructions = (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    )
    assert detect_format(CHATML + instructions) == "llama3_json"


@pytest.mark.parametrize("template", ["", CHATML, "{{ messages[0].content }} <tool_call>"])
def test_a_template_without_a_known_format_has_none(template: str) -> None:
    assert detect_format(template) is None
