"""Calls that are cut off or malformed are reported to the model; no text makes a parser raise or take long."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_call_texts import format_call

from verl.agents.formats import FORMATS
from verl.agents.formats.tool_calls import InvalidCall, ToolCall

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

WEATHER = ToolCall("get_weather", {"city": "Oslo", "days": "3"})
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]

# By format: from where on a call is recognized, and the last of what it needs.
ENDS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</function>"),
    "llama3_json": ('{"name":', "}"),
    "gpt-oss": ("<|channel|>commentary to=f", "}"),
    "glm": ("<tool_call>", "</tool_call>"),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>"),
    "kimi": ("<|tool_calls_section_begin|>", "<|tool_call_end|>"),
}

every_format = pytest.mark.parametrize("name", FORMATS)


def require_sentence(call: Any) -> None:
    assert isinstance(call, InvalidCall)
    assert call.reason.endswith(".")
    assert call.reason[0].isupper()
    assert "\n" not in call.reason
    assert len(call.text) <= 300


@every_format
def test_a_call_is_invalid_wherever_it_is_cut_off(name: str) -> None:
    text = format_call(name, ToolCall("get_weather", {"city": "Oslo", "note": 'a "b" {c}'}))
    opening, last = ENDS[name]
    for cut in range(len(opening)):
        assert FORMATS[name](text[:cut]).calls == ()
    for cut in range(len(opening), text.rindex(last) + len(last)):
        reply = FORMATS[name](text[:cut])
        assert reply.content == ""
        assert len(reply.calls) == 1, text[:cut]
        require_sentence(reply.calls[0])


HERMES = "<tool_call>%s</tool_call>"
QWEN = "<tool_call><function=f>%s</function></tool_call>"
GLM = "<tool_call>f%s</tool_call>"
HARMONY = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>%s<|call|>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>%s<|tool_call_end|><|tool_calls_section_end|>"
ARGUMENT = '{"name": "f", "arguments": {"a": %s}}'
JSON_ERROR = "is not valid JSON: Expecting "
NUMBER_ERROR = "a number is infinite, NaN or too long."

# Format, text, name that can be read, a part of the reason.
MALFORMED = [
    ("hermes", HERMES % "get_weather(city='Oslo')", "", JSON_ERROR + "value near"),
    ("hermes", HERMES % '{"name": "f", "arguments": {"a": 1}', "", JSON_ERROR + "',' delimiter near '</tool_call>'."),
    ("hermes", HERMES % '{"name": "f", "arguments": {}} and', "f", "Expected </tool_call> near 'and"),
    ("hermes", HERMES % '{"name": "f"}', "f", 'The call has no "arguments".'),
    ("hermes", HERMES % '{"name": "f", "arguments": [1]}', "f", "The arguments are not a JSON object."),
    ("hermes", HERMES % '{"name": "f", "arguments": "{} {}"}', "f", "Extra data near '{}'."),
    ("hermes", HERMES % '{"name": " ", "arguments": {}}', "", 'The call has no "name".'),
    ("hermes", HERMES % '["f", {}]', "", "The call is not a JSON object."),
    ("hermes", HERMES % (ARGUMENT % '"\n"'), "", "Invalid control character near"),
    ("hermes", HERMES % (ARGUMENT % '"\\ud800"'), "", "half of a surrogate pair."),
    ("hermes", HERMES % (ARGUMENT % "1e999"), "", NUMBER_ERROR),
    ("hermes", HERMES % (ARGUMENT % "NaN"), "", NUMBER_ERROR),
    ("hermes", HERMES % (ARGUMENT % ("9" * 5000)), "", NUMBER_ERROR),
    ("hermes", HERMES % (ARGUMENT % ("[" * 200 + "]" * 200)), "", "nested too deeply."),
    ("hermes", HERMES % ("[" * 100_000), "", "nested too deeply."),
    ("llama3_json", '<|python_tag|>search.call(query="Oslo")', "", JSON_ERROR + "value near 'search"),
    ("llama3_json", '<|python_tag|>["f"]', "", "The call is not a JSON object."),
    ("llama3_json", '{"name": "f", "parameters": 1}', "f", "The arguments are not a JSON object."),
    ("llama3_json", '{"name": "get_weather"}', "get_weather", 'The call has no "parameters".'),
    ("llama3_json", '{"name": "f", "parameters": {"a": {"name": "g", "parameters": {}}', "", JSON_ERROR),
    ("qwen3_coder", HERMES % '{"name": "f", "arguments": {}}', "", "The call does not end with </function>."),
    ("qwen3_coder", QWEN % "<parameter=a>1<parameter=b>2</parameter>", "f", "Expected </parameter> after the text"),
    ("qwen3_coder", QWEN % "<parameter=>1</parameter>", "f", "Expected the name of an argument near '>1"),
    ("qwen3_coder", QWEN % "a=1", "f", "Expected </function> near 'a=1"),
    ("glm", HERMES % "<arg_key>a</arg_key>", "", "Expected the name of a tool near '<arg_key>"),
    ("glm", GLM % "(1)", "f", "Expected </tool_call> near '(1)"),
    ("glm", GLM % "<arg_key>a</arg_key>1", "f", "Expected <arg_value> near '1"),
    ("glm", GLM % "<arg_key>a</arg_key><arg_value>1<arg_key>b", "f", "Expected </arg_value> after the text near '1"),
    ("gpt-oss", HARMONY % "Oslo", "f", "The arguments are not valid JSON: Expecting value near 'Oslo"),
    ("gpt-oss", HARMONY % "", "f", "The arguments are not valid JSON: Expecting value near '<|call|>'."),
    ("gpt-oss", HARMONY % "{} {}", "f", "Expected <|call|> near '{}<|call|>'."),
    ("deepseek", DEEPSEEK % "f{}", "f", "Expected <｜tool▁sep｜> near '{}"),
    ("deepseek", DEEPSEEK % "f<｜tool▁sep｜>Oslo", "f", "The arguments are not valid JSON: Expecting value near 'Oslo"),
    ("deepseek", DEEPSEEK % "function<｜tool▁sep｜>f\n```json\n{}", "f", "Expected ``` near"),
    ("kimi", KIMI % "f<|tool_call_argument_begin|>{}", "", "Expected functions.NAME:INDEX near 'f<"),
    ("kimi", KIMI % "functions.f:0{}", "f", "Expected <|tool_call_argument_begin|> near '{}"),
]


@pytest.mark.parametrize(("name", "text", "tool", "reason"), MALFORMED)
def test_a_malformed_call_is_reported(name: str, text: str, tool: str, reason: str) -> None:
    reply = FORMATS[name](text, TOOLS)
    [call] = reply.calls
    require_sentence(call)
    assert isinstance(call, InvalidCall)
    assert reason in call.reason
    assert call.name == tool
    assert reply.content == ""


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "llama3_json"])
def test_a_broken_call_does_not_hide_those_around_it(name: str) -> None:
    whole = format_call(name, WEATHER)
    without_name = whole.replace("get_weather", "").replace("{", "")
    first, broken, last = FORMATS[name](whole + without_name + whole).calls
    assert first == last == WEATHER
    require_sentence(broken)


def test_all_that_follows_a_broken_call_of_llama_belongs_to_it() -> None:
    whole = format_call("llama3_json", WEATHER)
    call, broken = FORMATS["llama3_json"](f"{whole}; {whole[:-1]}; {whole}").calls
    assert call == WEATHER
    require_sentence(broken)


@pytest.mark.parametrize("name", ["deepseek", "kimi"])
def test_a_call_outside_of_a_section_is_invalid(name: str) -> None:
    section, _ = ENDS[name]
    [call] = FORMATS[name](format_call(name, WEATHER).removeprefix(section)).calls
    assert isinstance(call, InvalidCall)
    assert call.reason == f"The call is not in a section that begins with {section}."


FRAGMENTS = re.findall(
    r"\S+",
    """
<think> </think> <tool_call> </tool_call> <function= <function=f> </function> <parameter= <parameter=a> </parameter>
<arg_key> </arg_key> <arg_value> </arg_value> <|python_tag|> ; {"name" {"name":"f","parameters": functions.f:0
{"name":"f","arguments":{"a":1}} { } [ ] {} {"a":"b"} " : , \\ 1 f > ``` ```json <|start|>assistant <|channel|>
commentary analysis to=functions.f to= <|message|> <|end|> <|call|> <|constrain|>json <｜tool▁calls▁begin｜>
<｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜> <|tool_calls_section_begin|>
<|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> <|tool_calls_section_end|>
""",
)
fragments = st.sampled_from([*FRAGMENTS, " ", "\n", " to=functions.f "]) | st.text(max_size=5)
schemas: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.sampled_from(["integer", "null", "#/$defs/a"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "parameters", "properties", "a", "type", "anyOf", "$ref"]), inner)
    ),
    max_leaves=6,
)


@every_format
@settings(max_examples=200)
@given(parts=st.lists(fragments, max_size=30), schema=schemas)
def test_any_text_is_read_with_any_schema(name: str, parts: list[str], schema: Any) -> None:
    text = "".join(parts)
    parameters = {"properties": {"a": schema}, "$defs": schema}
    tools = [{"function": {"name": "f", "parameters": parameters}}, {"function": schema}, {"name": schema}]
    reply = FORMATS[name](text, tools)
    for call in reply.calls:
        if isinstance(call, InvalidCall):
            require_sentence(call)
        else:
            json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()
    if name != "gpt-oss" and not reply.calls:
        assert reply.content == text


ADVERSARIAL: dict[str, Callable[[str], str]] = {
    "only openings": lambda name: ENDS[name][0],
    "only endings": lambda name: ENDS[name][1],
    "cut-off calls": lambda name: format_call(name, WEATHER).rpartition(ENDS[name][1])[0],
    "calls": lambda name: format_call(name, WEATHER),
    "calls and ends of reasoning": lambda name: format_call(name, WEATHER) + "</think>",
    "other JSON": lambda name: '{"name": "f", "a": [[]]}',
    "open strings": lambda name: ENDS[name][0] + '{"name": "f", "parameters": {"a": "',
    "open headers": lambda name: "<|channel|>analysis to=f <|channel|>  ",
    "nesting": lambda name: '{"a":[',
    "space": lambda name: " \n",
    "colons": lambda name: ":1",
}


@every_format
@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_a_megabyte_of_hostile_text_is_read_in_time(name: str, kind: str) -> None:
    """In quadratic time, it would take longer than the test may."""
    part = ADVERSARIAL[kind](name)
    calls = FORMATS[name](ENDS[name][0] + part * (1_000_000 // len(part))).calls
    attempts = sum(isinstance(call, InvalidCall) for call in calls)
    assert attempts <= 17  # each may look at all of the text
