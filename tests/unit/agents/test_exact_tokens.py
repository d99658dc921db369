"""The requests of an episode continue the tokens that the model generated, however it tokenized them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.chat_shapes import SHAPES, TOOL, make_tokenizer
from verl.agents.chat_model import ChatModel
from verl.agents.formats import FORMATS
from verl.agents.formats.tool_calls import ParsedReply, ToolCall
from verl.agents.rendering import ChatRenderer
from verl.types import Completion, SamplingParams

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

QUESTION = {"role": "user", "content": "Guess."}
NEXT = {"role": "user", "content": "Lower."}
LOOKUP: Any = SimpleNamespace(schema=TOOL)


class Script:
    """An engine that writes given tokens, and keeps the requests."""

    def __init__(self, *replies: tuple[list[int], str]) -> None:
        self.replies = [*replies]
        self.requests: list[list[int]] = []

    async def __call__(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        ids, reason = self.replies[len(self.requests)]
        self.requests.append(list(token_ids))
        return Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), reason)


def read_text(text: str, schemas: Sequence[Any]) -> ParsedReply:
    return ParsedReply(text, ())


def make_model(script: Script, name: str, parse: Any = read_text, **options: Any) -> ChatModel:
    return ChatModel(script, ChatRenderer(make_tokenizer(name)), SamplingParams(1000), parse, **options)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("name", SHAPES)
async def test_reencoding_drift_does_not_happen_with_replies_that_are_not_canonical(name: str) -> None:
    tokenizer = make_tokenizer(name)
    written = tokenizer.convert_tokens_to_ids([*"higher", SHAPES[name].eos])  # a token for each letter
    script = Script((written, "stop"), ([5], "length"))
    model = make_model(script, name)
    reply = await model.chat([QUESTION])
    await model.chat([QUESTION, reply.message, NEXT])
    first, second = script.requests
    assert second[: len(first) + len(written)] == first + written
    again = encode(tokenizer, tokenizer.decode(second))
    assert again != second, "tokenizing the conversation again would have changed what the model wrote"
    [sample] = model.transcript.to_samples(0, 0, 0.0, {})
    assert sample.tokens.tolist() == [*second, 5]
    assert sample.tokens[sample.mask].tolist() == [*written, 5]


async def test_a_reply_that_is_cut_off_within_a_character_is_continued() -> None:
    tokenizer = make_tokenizer("ChatML")
    written = encode(tokenizer, "🙂")[:1]
    script = Script((written, "length"), ([5], "length"))
    model = make_model(script, "ChatML")
    reply = await model.chat([QUESTION])
    assert reply.content == "\N{REPLACEMENT CHARACTER}"
    await model.chat([QUESTION, reply.message, NEXT])
    first, second = script.requests
    expected = ChatRenderer(tokenizer).render_next([NEXT], None)
    assert second == first + written + expected
    assert tokenizer.decode(expected).startswith("<|im_end|>\n<|im_start|>user")


async def test_an_empty_reply_is_continued() -> None:
    tokenizer = make_tokenizer("ChatML")
    script = Script(([tokenizer.eos_token_id], "stop"), ([5], "length"))
    model = make_model(script, "ChatML")
    reply = await model.chat([QUESTION])
    assert reply.content == ""
    await model.chat([QUESTION, reply.message, NEXT])
    whole = [QUESTION, {"role": "assistant", "content": ""}, NEXT]
    assert script.requests[1] == ChatRenderer(tokenizer).render_prompt(whole)


@pytest.mark.parametrize(
    ("name", "format", "text"),
    [
        ("ChatML", "hermes", '<tool_call>\n{"name": "lookup",  "arguments": {"key": "a"}}\n</tool_call><|im_end|>'),
        ("Llama 3", "llama3_json", '{"name": "lookup",  "parameters": {"key": "a"}}<|eot_id|>'),
        ("GLM-4", "hermes", '<tool_call>{"name": "lookup", "arguments": {"key": "a"}}</tool_call><|observation|>'),
    ],
)
async def test_a_call_that_is_written_unlike_the_template_s_own_is_continued(name: str, format: str, text: str) -> None:
    tokenizer = make_tokenizer(name)
    written = encode(tokenizer, text)
    script = Script((written, "stop"), ([5], "length"))
    model = make_model(script, name, FORMATS[format])
    reply = await model.chat([QUESTION], [LOOKUP])
    assert reply.calls == (ToolCall("lookup", {"key": "a"}),)
    answer = {
        "role": "tool",
        "tool_call_id": reply.message["tool_calls"][0]["id"],
        "name": "lookup",
        "content": "Seven.",
    }
    await model.chat([QUESTION, reply.message, answer], [LOOKUP])
    first, second = script.requests
    assert second[: len(first) + len(written)] == first + written
    new = tokenizer.decode(second[len(first) + len(written) :])
    assert "Seven." in new
    assert not new.startswith(tokenizer.decode(written[-1:])), "the end of the turn is there already"


async def test_a_call_may_be_sent_back_without_its_id_and_with_its_arguments_as_an_object() -> None:
    tokenizer = make_tokenizer("ChatML")
    text = '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call><|im_end|>'
    script = Script((encode(tokenizer, text), "stop"), ([5], "length"))
    model = make_model(script, "ChatML", FORMATS["hermes"])
    await model.chat([QUESTION], [LOOKUP])
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"key": "a"}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    await model.chat([QUESTION, message, {"role": "tool", "name": "lookup", "content": "Seven."}], [LOOKUP])
    assert model.transcript.last.parent is model.transcript.turns[0]


@pytest.mark.parametrize("name", ["Qwen3", "gpt-oss"])
async def test_with_a_branch_per_turn_every_request_is_the_whole_conversation(name: str) -> None:
    tokenizer = make_tokenizer(name)
    written = encode(tokenizer, f"<think>\nhalf\n</think>\n\n8{SHAPES[name].eos}")
    script = Script((written, "stop"), ([5], "length"))
    model = make_model(script, name, branch_per_turn=True)
    reply = await model.chat([QUESTION])
    messages = [QUESTION, reply.message, NEXT]
    await model.chat(messages)
    assert script.requests[1] == ChatRenderer(tokenizer).render_prompt(messages)
    assert "half" not in tokenizer.decode(script.requests[1]), "the template drops reasoning"
    samples = model.transcript.to_samples(0, 0, 0.0, {})
    assert [sample.tokens.tolist() for sample in samples] == [script.requests[0] + written, [*script.requests[1], 5]]


async def test_messages_that_no_reply_precedes_start_a_branch() -> None:
    tokenizer = make_tokenizer("ChatML")
    script = Script(([5], "length"), ([6], "length"))
    model = make_model(script, "ChatML")
    await model.chat([QUESTION])
    changed = [QUESTION, {"role": "assistant", "content": "what it did not say"}, NEXT]
    await model.chat(changed)
    assert script.requests[1] == ChatRenderer(tokenizer).render_prompt(changed)
    assert model.transcript.last.parent is None
