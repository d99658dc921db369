"""What verl reads from a call is what vLLM's parser for the same model reads: trained models can be served by vLLM."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from tool_call_texts import WRITERS
from transformers import PreTrainedTokenizerFast

from verl.agents.formats import FORMATS
from verl.agents.formats.tool_calls import ToolCall

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

SPECIAL_TOKENS = [
    *["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"],
    *[
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ],
    *["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"],
    "<|tool_call_argument_begin|>",
]

Read = Callable[[str, list[dict[str, Any]]], list[tuple[str, Any]]]
"""(text of a turn, schemas of the tools) -> names and arguments of its calls."""


def write_deepseek_v3(call: ToolCall) -> str:
    return (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n"
        f"```json\n{json.dumps(call.arguments)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )


# vLLM's name of a parser -> verl's name of the format, and how it writes a call.
PARSERS: dict[str, tuple[str, Callable[[ToolCall], str]]] = {
    "hermes": ("hermes", WRITERS["hermes"]),
    "qwen3_coder": ("qwen3_coder", WRITERS["qwen3_coder"]),
    "llama3_json": ("llama3_json", WRITERS["llama3_json"]),
    "glm45": ("glm", WRITERS["glm"]),
    "deepseek_v31": ("deepseek", WRITERS["deepseek"]),
    "deepseek_v3": ("deepseek", write_deepseek_v3),
    "kimi_k2": ("kimi", WRITERS["kimi"]),
    "openai": ("gpt-oss", WRITERS["gpt-oss"]),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<unk>", *SPECIAL_TOKENS])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        additional_special_tokens=SPECIAL_TOKENS,
    )


@pytest.fixture(scope="module", params=PARSERS)
def parser(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> tuple[str, Read]:
    """Return vLLM's name of a parser, and the parser."""
    pytest.importorskip("vllm.tool_parsers")
    make = make_harmony_reader if request.param == "openai" else make_reader
    return request.param, make(request.param, tokenizer)


def make_request(tools: list[dict[str, Any]]) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(model="model", messages=[{"role": "user", "content": "?"}], tools=tools)


def make_reader(name: str, tokenizer: PreTrainedTokenizerFast) -> Read:
    from vllm.tool_parsers import ToolParserManager

    def read(text: str, tools: list[dict[str, Any]]) -> list[tuple[str, Any]]:
        request = make_request(tools)
        parsed = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools).extract_tool_calls(text, request)
        return [(call.function.name, json.loads(call.function.arguments)) for call in parsed.tool_calls]

    return read


def make_harmony_reader(name: str, tokenizer: PreTrainedTokenizerFast) -> Read:
    """Return a reader of gpt-oss, which parses token ids with the vocabulary of openai_harmony."""
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
    from vllm.parser.parser_manager import ParserManager

    try:
        encoding = get_encoding()
    except Exception as error:  # noqa: BLE001 - it downloads the vocabulary unless it has it
        pytest.skip(f"gpt-oss is not compared: openai_harmony cannot load its vocabulary offline ({error})")
    parser_class = ParserManager.get_parser(name, enable_auto_tools=True, is_harmony=True)

    def read(text: str, tools: list[dict[str, Any]]) -> list[tuple[str, Any]]:
        request = make_request(tools)
        ids = encoding.encode(text, allowed_special="all")
        _, _, calls = parser_class(tokenizer, request.tools).parse(text, request, True, ids)
        return [(call.name, json.loads(call.arguments)) for call in calls or ()]

    return read


# Without "<": some of vLLM's parsers search for tags in the middle of arguments.
texts = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=12)
scalars = st.none() | st.booleans() | st.integers() | texts
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": texts,
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(scalars | st.lists(scalars, max_size=2), max_size=3),
    "object": st.dictionaries(texts, scalars | st.dictionaries(texts, scalars, max_size=2), max_size=3),
}


@st.composite
def calls_with_schemas(draw: st.DrawFn) -> tuple[list[ToolCall], list[dict[str, Any]]]:
    calls, schemas = [], []
    for name in draw(st.lists(st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True), min_size=1, max_size=3, unique=True)):
        keys = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)
        types = draw(st.dictionaries(keys, st.sampled_from(list(VALUES)), max_size=4))
        calls.append(ToolCall(name, {key: draw(VALUES[type_name]) for key, type_name in types.items()}))
        properties = {key: {"type": type_name} for key, type_name in types.items()}
        parameters = {"type": "object", "properties": properties}
        schemas.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    return calls, schemas


@settings(max_examples=40)
@given(calls_with_schemas())
def test_names_and_arguments_agree(
    parser: tuple[str, Read], written: tuple[list[ToolCall], list[dict[str, Any]]]
) -> None:
    name, read = parser
    calls, schemas = written
    format, write = PARSERS[name]
    text = ("<|start|>assistant" if name == "openai" else "\n").join(map(write, calls))
    expected = [(call.name, call.arguments) for call in calls]
    assert read(text, schemas) == expected
    assert FORMATS[format](text, schemas).calls == tuple(calls)


def test_text_before_a_call_changes_nothing(parser: tuple[str, Read]) -> None:
    name, read = parser
    format, write = PARSERS[name]
    call = ToolCall("get_weather", {"city": "Oslo"})
    thought = "Let me see.\n\n"
    if name == "openai":
        thought = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    assert read(thought + write(call), tools) == [("get_weather", {"city": "Oslo"})]
    assert FORMATS[format](thought + write(call), tools).calls == (call,)
