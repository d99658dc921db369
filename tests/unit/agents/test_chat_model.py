"""Messages become exact tokens: those that continue a reply continue its tokens, with what remains of the budget."""

import json
from typing import Any, ClassVar

import pytest
from chat_bpe import bpe_tokenizer
from listed_replies import ListedReplies

from verl.agents.chat_model import ChatModel
from verl.agents.errors import EpisodeLimitError
from verl.agents.formats import FORMATS
from verl.agents.formats.tool_calls import InvalidCall, ToolCall
from verl.agents.rendering import ChatRenderer
from verl.types import SamplingParams

pytestmark = pytest.mark.unit

TOKENIZER = bpe_tokenizer()
QUESTION = {"role": "user", "content": "What is red?"}
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "red"}}\n</tool_call>'


class Schema:
    schema: ClassVar = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}

    async def call(self, arguments: Any, timeout_s: float) -> Any:
        raise NotImplementedError


def make(script: ListedReplies, max_tokens: int = 200, **changes: Any) -> ChatModel:
    sampling = SamplingParams(max_tokens=max_tokens, seed=5)
    return ChatModel(script.generate, ChatRenderer(TOKENIZER), sampling, FORMATS["hermes"], **changes)


def answer(reply: Any, text: str = "7") -> dict[str, Any]:
    return {"role": "tool", "name": "lookup", "tool_call_id": reply.message["tool_calls"][0]["id"], "content": text}


async def test_a_second_request_starts_with_the_first_and_its_reply() -> None:
    script = ListedReplies(TOKENIZER, CALL, "7")
    model = make(script)
    reply = await model.chat([QUESTION], [Schema()])
    assert reply.calls == (ToolCall("lookup", {"key": "red"}),)
    await model.chat([QUESTION, reply.message, answer(reply)], [Schema()])
    first, second = model.transcript.turns
    assert script.requests[1] == [*script.requests[0], *first.completion.token_ids, *second.context]
    assert second.parent is first
    assert len(model.transcript.get_leaves()) == 1


async def test_the_whole_conversation_is_what_the_template_renders() -> None:
    script = ListedReplies(TOKENIZER, "8", "4")
    model = make(script)
    reply = await model.chat([QUESTION])
    messages = [QUESTION, reply.message, {"role": "user", "content": "Lower."}]
    await model.chat(messages)
    whole = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert TOKENIZER.decode(script.requests[1]) == whole


@pytest.mark.parametrize("change", ["arguments as an object", "no ids", "content None"])
async def test_a_reply_is_recognized_as_agents_write_it(change: str) -> None:
    script = ListedReplies(TOKENIZER, CALL, "7")
    model = make(script)
    reply = await model.chat([QUESTION], [Schema()])
    said = json.loads(json.dumps(reply.message))
    if change == "arguments as an object":
        said["tool_calls"][0]["function"]["arguments"] = {"key": "red"}
    elif change == "no ids":
        del said["tool_calls"][0]["id"]
    else:
        said["content"] = None
    await model.chat([QUESTION, said, answer(reply)], [Schema()])
    assert len(model.transcript.get_leaves()) == 1


@pytest.mark.parametrize("branch_per_turn", [False, True])
async def test_turns_after_the_same_messages_are_in_the_same_state(branch_per_turn: bool) -> None:
    model = make(ListedReplies(TOKENIZER, "8", "4", "2", "1"), branch_per_turn=branch_per_turn)
    messages = [QUESTION]
    for text in ("Lower.", "Higher.", "Lower.", None):
        reply = await model.chat(messages)
        messages = [*messages, reply.message, {"role": "user", "content": text or ""}]
    first, lower, higher, again = (turn.state for turn in model.transcript.turns)
    assert lower == again
    assert len({first, lower, higher}) == 3
    samples = model.transcript.to_samples(0, 0, 0.0, {})
    assert {turn[1]: turn[3] for each in samples for turn in each.turns} == dict(
        enumerate([first, lower, higher, again])
    )
    assert all(sample.mask[turn[0]] for sample in samples for turn in sample.turns)


async def test_other_messages_or_tools_start_a_branch() -> None:
    script = ListedReplies(TOKENIZER, "8", "4", "2", "1")
    model = make(script)
    reply = await model.chat([QUESTION])
    await model.chat([{"role": "user", "content": "Other."}, reply.message, QUESTION])
    await model.chat([QUESTION, reply.message, QUESTION], [Schema()])
    await model.chat([QUESTION, {"role": "assistant", "content": "9"}, QUESTION])
    assert [turn.parent for turn in model.transcript.turns] == [None] * 4


async def test_a_further_request_gets_what_remains_of_the_budget() -> None:
    script = ListedReplies(TOKENIZER, "8", "4" * 500)
    model = make(script, max_tokens=60)
    reply = await model.chat([QUESTION])
    following = [QUESTION, reply.message, {"role": "user", "content": "Lower."}]
    second = await model.chat(following)
    first, last = model.transcript.turns
    used = len(first.completion.token_ids) + len(last.context)
    assert script.samplings[1].max_tokens == 60 - used
    assert second.finish_reason == "length"
    with pytest.raises(EpisodeLimitError):
        await model.chat([*following, second.message, QUESTION])


async def test_the_context_window_limits_a_reply_too() -> None:
    script = ListedReplies(TOKENIZER, "8")
    model = make(script, max_sequence_tokens=len(ChatRenderer(TOKENIZER).render_prompt([QUESTION])) + 4)
    await model.chat([QUESTION])
    assert script.samplings[0].max_tokens == 4


async def test_agents_shorten_replies_but_do_not_change_how_they_are_sampled() -> None:
    script = ListedReplies(TOKENIZER, "8", "4")
    model = make(script)
    await model.chat([QUESTION], max_tokens=1)
    await model.chat([QUESTION], max_tokens=10_000)
    assert [each.max_tokens for each in script.samplings] == [1, 200]
    assert {each.temperature for each in script.samplings} == {SamplingParams(max_tokens=1).temperature}
    assert script.samplings[0].seed != script.samplings[1].seed


async def test_turns_are_limited_and_nothing_is_said_after_the_end() -> None:
    model = make(ListedReplies(TOKENIZER, "8", "4"), max_turns=1)
    await model.chat([QUESTION])
    with pytest.raises(EpisodeLimitError, match="1 turn"):
        await model.chat([QUESTION])
    ended = make(ListedReplies(TOKENIZER, "8"))
    ended.close()
    with pytest.raises(EpisodeLimitError, match="has ended"):
        await ended.chat([QUESTION])
    assert ended.transcript.turns == []


async def test_every_turn_is_a_branch_where_the_template_rewrites_history() -> None:
    script = ListedReplies(TOKENIZER, "8", "4")
    model = make(script, branch_per_turn=True)
    reply = await model.chat([QUESTION])
    messages = [QUESTION, reply.message, {"role": "user", "content": "Lower."}]
    await model.chat(messages)
    assert len(model.transcript.get_leaves()) == 2
    assert script.requests[1] == ChatRenderer(TOKENIZER).render_prompt(messages)


async def test_a_malformed_call_stays_in_the_text_that_the_next_request_repeats() -> None:
    script = ListedReplies(TOKENIZER, '<tool_call>\n{"name": "lookup"', "7")
    model = make(script)
    reply = await model.chat([QUESTION], [Schema()])
    assert isinstance(reply.calls[0], InvalidCall)
    await model.chat([QUESTION, reply.message, {"role": "tool", "content": "Error"}], [Schema()])
    assert len(model.transcript.get_leaves()) == 1
