"""Agents that ask the model with OpenAI's SDK train on the same tokens as agents that ask it directly."""

import asyncio
import json
import threading
from typing import Any

import numpy as np
import openai
import pytest
from gateway_agents import LOOKUP, QUESTION, count_turns, open_client, play
from openai import OpenAI
from scripted_model import LOOKUP_CALL, ScriptedModel, call_lookup, list_samples

from verl.agents.builtin_agents import Task
from verl.agents.chat_model import ChatModel
from verl.types import Sample, SamplingParams

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]


def assert_equal(first: list[Sample], second: list[Sample]) -> None:
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        for name in ("tokens", "mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
        assert one.finish_reason == other.finish_reason


def answer_calls(message: Any) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls]


async def ask_directly(task: Task, model: ChatModel) -> float:
    messages: list[Any] = list(task.messages)
    while True:
        reply = await model.chat(messages, [LOOKUP])
        messages.append(reply.message)
        if not reply.calls:
            return 1.0
        call = reply.message["tool_calls"][0]
        messages.append({"role": "tool", "tool_call_id": call["id"], "name": "lookup", "content": "7"})


async def ask_by_sdk(task: Task, base_url: str, api_key: str) -> float:
    messages: list[Any] = list(task.messages)
    async with open_client(base_url, api_key) as client:
        while True:
            completion = await client.chat.completions.create(model="any", messages=messages, tools=[LOOKUP])
            [choice] = completion.choices
            messages.append(choice.message)
            assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
            if not choice.message.tool_calls:
                return 1.0
            messages += answer_calls(choice.message)


async def ask_by_stream(task: Task, base_url: str, api_key: str) -> float:
    messages: list[Any] = list(task.messages)
    async with open_client(base_url, api_key) as client:
        while True:
            async with client.chat.completions.stream(model="any", messages=messages, tools=[LOOKUP]) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            messages.append({"role": "assistant", "content": message.content})
            if not message.tool_calls:
                return 1.0
            calls = [
                json.loads(call.model_dump_json(include={"id", "type", "function"})) for call in message.tool_calls
            ]
            for call in calls:
                call["function"].pop("parsed_arguments", None)
            messages[-1]["tool_calls"] = calls
            messages += answer_calls(message)


def ask_synchronously(task: Task, base_url: str, api_key: str) -> float:
    assert threading.current_thread() is not threading.main_thread()
    messages: list[Any] = list(task.messages)
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            message = client.chat.completions.create(model="any", messages=messages, tools=[LOOKUP]).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return 1.0
            messages += answer_calls(message)


async def ask_while_blocking(task: Task, base_url: str, api_key: str) -> float:
    return ask_synchronously(task, base_url, api_key)


@pytest.mark.parametrize("agent", [ask_by_sdk, ask_by_stream, ask_synchronously, ask_while_blocking])
@pytest.mark.parametrize("branch_per_turn", [False, True])
async def test_samples_are_those_of_an_agent_that_asks_directly(agent: Any, branch_per_turn: bool) -> None:
    direct, served = ScriptedModel(call_lookup), ScriptedModel(call_lookup)
    expected = await play(ask_directly, direct, use_inference_chat_template=branch_per_turn)
    transcript = await play(agent, served, use_inference_chat_template=branch_per_turn)
    assert_equal(list_samples(transcript), list_samples(expected))
    assert served.requests == direct.requests
    assert len(list_samples(transcript)) == (3 if branch_per_turn else 1)
    assert transcript.score == 1.0
    assert not transcript.is_truncated
    assert transcript.metrics == {
        "tools/calls": 2.0,
        "tools/invalid_calls": 0.0,
        "episode/turns": 3.0,
        "episode/attempts": 1.0,
        "episode/truncated": 0.0,
    }
    assert transcript.messages is not None
    assert [message["role"] for message in transcript.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]


async def test_generated_tokens_are_kept_where_text_would_be_tokenized_differently() -> None:
    model = ScriptedModel(call_lookup)
    [sample] = list_samples(await play(ask_by_sdk, model))
    text = model.tokenizer.decode(sample.tokens.tolist())
    assert model.tokenizer.encode(text, add_special_tokens=False) != sample.tokens.tolist()
    last, _ = model.requests[-1]
    assert sample.tokens.tolist()[: len(last)] == last, "what the model was asked is what is trained on"


async def test_a_reply_is_recognized_as_agents_write_it_back() -> None:
    def rewrite(message: Any) -> list[Any]:
        text = message.content.strip()
        calls = [
            {"id": "mine", "type": "function", "function": {"name": "lookup", "arguments": ' {"key" : "a"} '}}
            for _ in message.tool_calls or ()
        ]
        content = [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}] if text else None
        return [{"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}]

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        messages: list[Any] = list(task.messages)
        async with open_client(base_url, api_key) as client:
            for content in ("Go on.", "And then?"):
                completion = await client.chat.completions.create(model="any", messages=messages, tools=[LOOKUP])
                messages += [*rewrite(completion.choices[0].message), {"role": "user", "content": content}]
            await client.chat.completions.create(model="any", messages=messages, tools=[LOOKUP])
        return 1.0

    model = ScriptedModel(lambda prompt: f"\n\nI call {LOOKUP_CALL}" if "Go on." not in prompt else "\n\nyes ")
    transcript = await play(agent, model)
    assert len(transcript.turns) == 3
    assert len(list_samples(transcript)) == 1


async def test_streamed_replies_equal_plain_ones_in_messages_and_token_ids() -> None:
    async def agent(task: Task, base_url: str, api_key: str) -> None:
        async with open_client(base_url, api_key) as client:
            arguments: dict[str, Any] = {"model": "any", "messages": task.messages, "tools": [LOOKUP]}
            plain = await client.chat.completions.create(**arguments)
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(
                    **arguments, stream=True, stream_options={"include_usage": True}
                )
            ]
            async with client.chat.completions.stream(**arguments) as stream:
                events = [event.type async for event in stream]
                whole = (await stream.get_final_completion()).choices[0]
        assert plain.usage == chunks[-1].usage
        assert chunks[-1].choices == []
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == [
            plain.choices[0].finish_reason
        ]
        assert whole.finish_reason == plain.choices[0].finish_reason
        assert whole.message.content == plain.choices[0].message.content
        if plain.choices[0].message.tool_calls:
            [one], [other] = plain.choices[0].message.tool_calls, whole.message.tool_calls
            assert (one.function.name, one.function.arguments) == (other.function.name, other.function.arguments)
            assert "tool_calls.function.arguments.done" in events

    for text in (LOOKUP_CALL, f"I see.\n{LOOKUP_CALL}", "no tools", ""):
        transcript = await play(agent, ScriptedModel(lambda prompt, text=text: text))
        assert transcript.failure is None, (text, transcript.failure)
        plain, *streamed = (turn.completion for turn in transcript.turns)
        assert streamed
        for completion in streamed:
            assert list(completion.token_ids) == list(plain.token_ids)
            assert list(completion.logprobs) == list(plain.logprobs)


async def test_the_sampling_of_the_run_wins() -> None:
    model = ScriptedModel(count_turns)

    async def agent(task: Task, base_url: str, api_key: str) -> None:
        async with open_client(base_url, api_key) as client:
            completion = await client.chat.completions.create(
                model="any",
                messages=task.messages,
                temperature=0,
                top_p=0.1,
                seed=99,
                logit_bias={"5": 100},
                stop=["answer"],
                frequency_penalty=2,
                max_tokens=5,
            )
            assert completion.choices[0].message.content == "the a"
            assert completion.choices[0].finish_reason == "length"
            with pytest.raises(openai.BadRequestError, match="n has to be 1"):
                await client.chat.completions.create(model="any", messages=task.messages, n=2)

    transcript = await play(agent, model)
    assert transcript.failure is None, transcript.failure
    [(_, sampling)] = model.requests
    assert sampling == SamplingParams(max_tokens=5, temperature=0.7, top_p=0.9, seed=5)


async def test_the_budget_is_shared_by_all_turns() -> None:
    async def agent(task: Task, base_url: str, api_key: str) -> float:
        messages: list[Any] = list(task.messages)
        async with open_client(base_url, api_key) as client:
            for _ in range(50):
                completion = await client.chat.completions.create(model="any", messages=messages, max_tokens=1000)
                messages += [completion.choices[0].message, {"role": "user", "content": "Again."}]
        return 1.0

    model = ScriptedModel(count_turns)
    transcript = await play(agent, model, SamplingParams(max_tokens=100))
    [sample] = list_samples(transcript)
    prompt = len(model.requests[0][0])
    assert [sampling.max_tokens for _, sampling in model.requests] == [
        100 - (len(token_ids) - prompt) for token_ids, _ in model.requests
    ]
    assert prompt < len(sample.tokens) <= prompt + 100
    assert transcript.is_truncated
    assert sample.finish_reason == "length"
    assert transcript.score is None, "the agent raised"


async def test_another_conversation_has_its_own_prompt_and_a_rewritten_one_does_not() -> None:
    async def agent(task: Task, base_url: str, api_key: str) -> None:
        async with open_client(base_url, api_key) as client:

            async def ask(*messages: Any) -> Any:
                completion = await client.chat.completions.create(model="any", messages=messages)
                return {"role": "assistant", "content": completion.choices[0].message.content}

            example = {"role": "assistant", "content": "an example"}
            reply = await ask(QUESTION)
            await ask({"role": "developer", "content": "x" * 300}, QUESTION, example, QUESTION)
            await ask({"role": "system", "content": "short"}, QUESTION, reply, QUESTION)

    model = ScriptedModel(count_turns)
    transcript = await play(agent, model, SamplingParams(max_tokens=100))
    assert len(list_samples(transcript)) == 3
    first, second, third = (sampling.max_tokens for _, sampling in model.requests)
    assert first == second == 100
    assert model.prompts[1].startswith("<|im_start|>system\nxxx")
    reply = len("the answer 1") + 1
    assert third < 100 - reply, "a reply of the episode and what follows is no prompt"


async def test_an_agent_that_ignores_a_limit_is_truncated_and_gets_no_further_reply() -> None:
    codes: list[str | None] = []

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        async with open_client(base_url, api_key) as client:
            for content in ("a", "b", "c", "d"):
                try:
                    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": content}])
                except openai.BadRequestError as error:
                    codes.append(error.code)
        return 0.25

    model = ScriptedModel(count_turns)
    transcript = await play(agent, model, max_turns=2)
    assert codes == ["context_length_exceeded"] * 2
    assert len(model.requests) == 2, "a client error is not sent again"
    assert transcript.is_truncated
    assert transcript.score == 0.25
    assert transcript.failure is None


async def test_parallel_equal_requests_are_branches() -> None:
    both = asyncio.Event()

    async def wait_for_both(index: int) -> None:
        if index == 1:
            both.set()
        await both.wait()

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        async with open_client(base_url, api_key) as client:
            requests = [client.chat.completions.create(model="any", messages=task.messages) for _ in range(2)]
            first, second = await asyncio.gather(*requests)
        assert first.id != second.id
        return 1.0

    transcript = await play(agent, ScriptedModel(count_turns, wait_for_both))
    assert len(list_samples(transcript)) == 2


async def test_calls_that_cannot_be_read_are_text_and_counted() -> None:
    broken = '<tool_call>{"name": "lookup", "arguments": {]}</tool_call>'

    def reply(prompt: str) -> str:
        return "done" if "Try again." in prompt else f"I try {broken}"

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        async with open_client(base_url, api_key) as client:
            ask = client.chat.completions.create
            first = (await ask(model="any", messages=task.messages, tools=[LOOKUP])).choices[0]
            assert first.message.tool_calls is None
            assert first.message.content == f"I try {broken}"
            assert first.finish_reason == "stop"
            messages: list[Any] = [*task.messages, first.message, {"role": "user", "content": "Try again."}]
            await ask(model="any", messages=messages, tools=[LOOKUP])
        return 1.0

    transcript = await play(agent, ScriptedModel(reply))
    assert len(list_samples(transcript)) == 1, "the second request continues the first"
    assert transcript.metrics["tools/invalid_calls"] == 1.0
    assert (await play(agent, ScriptedModel(reply), max_invalid_calls=0)).is_truncated


async def test_tool_choice_none_leaves_calls_as_text() -> None:
    async def agent(task: Task, base_url: str, api_key: str) -> float:
        async with open_client(base_url, api_key) as client:
            completion = await client.chat.completions.create(
                model="any", messages=task.messages, tools=[LOOKUP], tool_choice="none"
            )
        assert completion.choices[0].message.tool_calls is None
        assert completion.choices[0].message.content == LOOKUP_CALL
        return 1.0

    model = ScriptedModel(lambda prompt: LOOKUP_CALL)
    assert (await play(agent, model)).failure is None
    assert "lookup" in model.prompts[0], "the model knows the tools"
