"""Agents that ask the model with OpenAI's SDK train on the same tokens as agents that ask it directly."""

import asyncio
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from agent_config import agent_config
from openai import AsyncOpenAI, OpenAI
from scripted_model import LOOKUP_CALL, ScriptedModel, call_lookup, list_samples, play_episode

import verl.agents.gateway.server
import verl.agents.gateway.session
from verl.agents.agent_episode import AgentEpisode
from verl.agents.builtin_agents import Task
from verl.agents.chat_model import ChatModel
from verl.agents.transcript import Transcript
from verl.config.paths import change_settings
from verl.errors import ConfigError
from verl.types import Prompt, Sample, SamplingParams

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

SAMPLING = SamplingParams(max_tokens=400, temperature=0.7, top_p=0.9, seed=5)
QUESTION = {"role": "user", "content": "What is the answer of a?"}
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Return a value.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def count_turns(prompt: str) -> str:
    return f"the answer {prompt.count('<|im_start|>assistant')}"


async def play(
    agent: Callable[..., Any], model: ScriptedModel, sampling: SamplingParams = SAMPLING, **settings: Any
) -> Transcript:
    prompt = Prompt(row=0, token_ids=[1], raw=[QUESTION], ground_truth="2", extra_info={"a": "7"})
    return await play_episode(agent, model, sampling, prompt, **settings)


def assert_equal(first: list[Sample], second: list[Sample]) -> None:
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        for name in ("tokens", "mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
        assert one.finish_reason == other.finish_reason


def open_client(base_url: str, api_key: str, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key=api_key, **options)


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


class RetryWatch:
    """Opens the gate of an engine when a client sends its request for the second time."""

    def __init__(self) -> None:
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()

    async def wait(self, index: int) -> None:
        await self._event.wait()

    async def look(self, request: Any) -> None:
        if request.headers["x-stainless-retry-count"] != "0":
            self._loop.call_soon_threadsafe(self._event.set)

    def open_client(self, base_url: str, api_key: str, **options: Any) -> AsyncOpenAI:
        http_client = openai.DefaultAsyncHttpxClient(event_hooks={"request": [self.look]})
        return open_client(base_url, api_key, http_client=http_client, **options)


async def test_a_retry_after_a_timeout_gets_the_reply_of_the_first_request() -> None:
    watch = RetryWatch()

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        async with watch.open_client(base_url, api_key, timeout=0.5, max_retries=9) as client:
            first = await client.chat.completions.create(model="any", messages=task.messages)
            second = await client.chat.completions.create(model="any", messages=task.messages)
        assert first.id != second.id, "a request that is no retry is a request of its own"
        return 1.0

    model = ScriptedModel(count_turns, watch.wait)
    transcript = await play(agent, model)
    assert len(list_samples(transcript)) == 2
    assert len(model.requests) == 2


async def test_a_retry_after_a_lost_response_gets_the_recorded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailsOnce(verl.agents.gateway.server.JSONResponse):
        count = 0

        def render(self, content: Any) -> bytes:
            FailsOnce.count += 1
            if FailsOnce.count == 1:
                raise ConnectionResetError("the reply is recorded, and lost")
            return super().render(content)

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        async with open_client(base_url, api_key) as client:
            await client.chat.completions.create(model="any", messages=task.messages)
        return 1.0

    monkeypatch.setattr(verl.agents.gateway.server, "JSONResponse", FailsOnce)
    model = ScriptedModel(count_turns)
    transcript = await play(agent, model)
    assert FailsOnce.count == 2
    assert len(model.requests) == len(list_samples(transcript)) == 1


async def test_an_equal_request_gets_the_reply_of_a_client_that_hung_up() -> None:
    loop, gone = asyncio.get_running_loop(), asyncio.Event()

    async def wait_until_gone(index: int) -> None:
        await gone.wait()
        await asyncio.sleep(0.1)  # the server notices, too

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        url, body = f"{base_url}/chat/completions", {"messages": task.messages}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=60) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(url, json=body, timeout=0.5)
            loop.call_soon_threadsafe(gone.set)
            responses = [(await client.post(url, json=body)).json() for _ in range(2)]
        assert responses[0]["id"] != responses[1]["id"], "a reply is sent once"
        return 1.0

    model = ScriptedModel(count_turns, wait_until_gone)
    transcript = await play(agent, model)
    assert len(list_samples(transcript)) == len(model.requests) == 2


async def test_a_reply_that_nobody_received_is_dropped() -> None:
    done = asyncio.Event()

    async def hold_the_first(index: int) -> None:
        if index == 0:
            await done.wait()
        else:
            done.set()
            await asyncio.sleep(0.05)

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        async with open_client(base_url, api_key, max_retries=0) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="any", messages=task.messages, timeout=0.3)
            other = [{"role": "user", "content": "Something else."}]
            await client.chat.completions.create(model="any", messages=other)
        return 1.0

    model = ScriptedModel(count_turns, hold_the_first)
    transcript = await play(agent, model)
    [sample] = list_samples(transcript)
    assert len(model.requests) == 2
    assert "Something else." in model.tokenizer.decode(sample.tokens.tolist())


async def test_a_failure_of_the_engine_that_a_retry_overcomes_is_not_a_turn() -> None:
    async def fail_once(index: int) -> None:
        if index == 0:
            raise RuntimeError("engine lost")

    transcript = await play(ask_once, ScriptedModel(count_turns, fail_once), max_turns=1)
    assert len(list_samples(transcript)) == 1
    assert transcript.metrics["episode/attempts"] == 1
    assert not transcript.is_truncated


async def ask_once(task: Task, base_url: str, api_key: str) -> float:
    async with open_client(base_url, api_key) as client:
        await client.chat.completions.create(model="any", messages=task.messages)
    return 1.0


async def test_a_failure_of_the_engine_gives_no_score_even_if_the_agent_ignores_it() -> None:
    async def agent(task: Task, base_url: str, api_key: str) -> float:
        async with open_client(base_url, api_key, max_retries=0) as client:
            await client.chat.completions.create(model="any", messages=task.messages)
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "more"}])
        return 0.0

    async def fail(index: int) -> None:
        if index % 2:
            raise RuntimeError("engine lost")

    model = ScriptedModel(count_turns, fail)
    transcript = await play(agent, model)
    assert transcript.failure is not None
    assert "engine lost" in transcript.failure.message
    assert transcript.score is None
    assert len(model.requests) == 4, "the episode is played again"


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


async def test_only_the_key_of_the_episode_is_accepted_and_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "uvicorn")
    caplog.set_level(logging.DEBUG, "verl")
    keys: list[str] = []

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        keys.append(api_key)
        assert base_url.startswith("http://127.0.0.1:")
        wrong = (None, "x", api_key, f"Bearer {api_key[:-1]}", f"Bearer {api_key}é", f"Basic {api_key}")
        async with httpx.AsyncClient() as client:
            for each, path in itertools.product(wrong, ("/chat/completions", "/reward", "/models")):
                headers = {} if each is None else {"Authorization": each.encode()}
                method = "GET" if path == "/models" else "POST"
                response = await client.request(method, base_url + path, headers=headers, json={"reward": 9.0})
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
        async with open_client(base_url.replace("/e/0/", "/e/77/"), api_key) as sdk:
            with pytest.raises(openai.NotFoundError, match="no such episode"):
                await sdk.models.list()
        async with open_client(base_url, api_key) as sdk:
            assert [model.id for model in (await sdk.models.list()).data] == ["policy"]
            with pytest.raises(openai.NotFoundError, match="is not served"):
                await sdk.responses.create(model="any", input="hi")
            await sdk.chat.completions.create(model="any", messages=task.messages)
        return 1.0

    transcript = await play(agent, ScriptedModel(count_turns))
    assert transcript.failure is None, transcript.failure
    assert len(keys[0]) >= 32
    assert keys[0] not in caplog.text


async def test_after_the_end_requests_are_refused() -> None:
    given: list[tuple[str, str]] = []

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        given.append((base_url, api_key))
        return await ask_once(task, base_url, api_key)

    model = ScriptedModel(count_turns)
    episode = AgentEpisode(agent_config(agent="test"), model.tokenizer, agent=agent)
    prompt = Prompt(row=0, token_ids=[1], raw=[QUESTION])
    await asyncio.gather(*(episode(prompt, model.generate, SAMPLING) for _ in range(2)))
    (first_url, first_key), (second_url, second_key) = given
    assert first_url != second_url
    assert first_key != second_key
    async with open_client(first_url, first_key) as client:
        with pytest.raises(openai.APIStatusError) as error:
            await client.chat.completions.create(model="any", messages=[QUESTION])
    assert error.value.status_code == 410
    assert len(model.requests) == 2
    await episode.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(first_url)


@pytest.mark.parametrize("is_sync", [False, True])
async def test_an_agent_that_does_not_end_is_abandoned(is_sync: bool) -> None:
    release, addresses = threading.Event(), []

    def ask(base_url: str, api_key: str) -> None:
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="any", messages=[QUESTION])

    def linger(task: Task, base_url: str, api_key: str) -> float:
        addresses.append((base_url, api_key))
        ask(base_url, api_key)
        release.wait(60)
        return 1.0

    async def linger_in_loop(task: Task, base_url: str, api_key: str) -> float:
        return linger(task, base_url, api_key)

    model = ScriptedModel(count_turns)
    episode = AgentEpisode(
        agent_config(agent="test", deadline_s=4.0), model.tokenizer, agent=linger if is_sync else linger_in_loop
    )
    transcript = await episode(Prompt(row=0, token_ids=[1], raw=[QUESTION]), model.generate, SAMPLING)
    assert transcript.is_truncated
    assert transcript.metrics["episode/deadline_exceeded"] == 1.0
    with pytest.raises(openai.APIStatusError) as refused:
        await asyncio.to_thread(ask, *addresses[0])
    assert refused.value.status_code == 410
    assert len(transcript.turns) == 1
    release.set()
    await episode.close()


@pytest.mark.parametrize(("returned", "score"), [(None, 0.5), (0.25, 0.25)])
async def test_a_reward_can_be_sent(returned: float | None, score: float) -> None:
    async def agent(task: Task, base_url: str, api_key: str, reward_key: str) -> float | None:
        headers = {"Authorization": f"Bearer {reward_key}"}
        async with httpx.AsyncClient(headers=headers) as client:
            url = base_url.removesuffix("/v1") + "/reward"
            numbers = ('"1"', "null", "true", "NaN", "-Infinity", "1e400", "1" * 400, "-100.5", "1e9")
            for wrong in ({}, [1], *(f'{{"reward": {number}}}' for number in numbers)):
                content = wrong if isinstance(wrong, str) else json.dumps(wrong)
                assert (await client.post(url, content=content)).status_code == 400
            await ask_once(task, base_url, api_key)
            assert (await client.post(url, json={"reward": 0.5})).json() == {"reward": 0.5}
        return returned

    transcript = await play(agent, ScriptedModel(count_turns))
    assert transcript.failure is None, transcript.failure
    assert transcript.score == score


async def test_a_reward_that_was_sent_is_kept_when_a_limit_or_the_timeout_ends_the_agent() -> None:
    async def agent(task: Task, base_url: str, api_key: str, reward_key: str) -> None:
        await ask_once(task, base_url, api_key)
        headers = {"Authorization": f"Bearer {reward_key}"}
        async with httpx.AsyncClient(headers=headers) as client:
            await client.post(f"{base_url}/reward", json={"reward": 0.5})
        await ask_once(task, base_url, api_key)
        await asyncio.sleep(60)

    for settings in ({"max_turns": 1}, {"deadline_s": 4.0}):
        transcript = await play(agent, ScriptedModel(count_turns), **settings)
        assert transcript.is_truncated
        assert transcript.score == 0.5


async def test_the_key_for_requests_does_not_post_rewards_nor_the_other_way_round() -> None:
    status: list[int] = []

    async def agent(task: Task, base_url: str, api_key: str, reward_key: str) -> None:
        await ask_once(task, base_url, api_key)
        async with httpx.AsyncClient() as client:
            for key, path in ((api_key, "reward"), (reward_key, "chat/completions"), (reward_key, "models")):
                headers, method = {"Authorization": f"Bearer {key}"}, "GET" if path == "models" else "POST"
                body = {"reward": 1.0, "messages": task.messages}
                response = await client.request(method, f"{base_url}/{path}", headers=headers, json=body)
                status.append(response.status_code)

    transcript = await play(agent, ScriptedModel(count_turns))
    assert status == [401] * 3
    assert transcript.score is None
    assert len(transcript.turns) == 1


async def test_a_run_with_a_reward_refuses_rewards_of_agents() -> None:
    codes: list[str] = []

    async def agent(task: Task, base_url: str, api_key: str, reward_key: str) -> None:
        await ask_once(task, base_url, api_key)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {reward_key}"}) as client:
            response = await client.post(f"{base_url}/reward", json={"reward": 1.0})
            codes.append(response.json()["error"]["code"])

    model = ScriptedModel(count_turns)
    settings = change_settings(agent_config(agent="test"), {"reward.custom_reward_function.path": "reward.py"})
    episode = AgentEpisode(settings, model.tokenizer, agent=agent)
    transcript = await episode(Prompt(row=0, token_ids=[1], raw=[QUESTION]), model.generate, SAMPLING)
    await episode.close()
    assert codes == ["reward_refused"]
    assert transcript.score is None


async def read_end(reader: asyncio.StreamReader) -> bytes:
    """Return what the server sends until it closes the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""


async def connect(base_url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx.URL(base_url)
    return await asyncio.open_connection(url.host, url.port)


async def test_connections_are_dropped_unless_their_headers_are_complete_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verl.agents.gateway.server, "REQUEST_S", 0.5)

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        silent, _ = await connect(base_url)
        slow, writer = await connect(base_url)
        sending = asyncio.ensure_future(drip(writer))
        assert await read_end(silent) == await read_end(slow) == b""
        sending.cancel()
        await ask_once(task, base_url, api_key)
        return 1.0

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /e/0/v1/models HTTP/1.1\r\n")
        while True:
            writer.write(b"a: b\r\n")
            await asyncio.sleep(0.05)

    assert (await play(agent, ScriptedModel(count_turns))).score == 1.0


async def test_connections_headers_and_bodies_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl.agents.gateway.server, "MAX_CONNECTIONS", 8)

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        headers = {"Authorization": f"Bearer {api_key}"}

        async def ask(path: str, content: bytes | str | None = None, **more: str) -> int | None:
            try:
                async with httpx.AsyncClient(headers=headers) as client:
                    method = "GET" if content is None else "POST"
                    return (await client.request(method, path, content=content, headers=more)).status_code
            except httpx.TransportError:  # the server has closed the connection while the request was sent
                return None

        url = f"{base_url}/chat/completions"
        assert await ask(url, b"x" * (9 << 20)) in (413, None)
        assert await ask(url, b"[" * 100_000) == 400
        nested = f'{{"messages": [{{"role": "user", "content": {"[" * 900 + "]" * 900}}}]}}'
        assert await ask(url, nested) == 400
        assert await ask(f"{base_url}/models", x="y" * (1 << 20)) in (400, None)
        assert await ask(base_url.replace("/e/0/", f"/e/{'9' * 5000}/"), b"") == 404
        connections = [await connect(base_url) for _ in range(12)]
        ends = [asyncio.ensure_future(read_end(reader)) for reader, _ in connections]
        done, _ = await asyncio.wait(ends, timeout=5, return_when=asyncio.ALL_COMPLETED)
        assert len(done) >= 4, "those above the limit are closed"
        for end, (_, writer) in zip(ends, connections, strict=True):
            end.cancel()
            writer.close()
        await asyncio.sleep(0.2)
        await ask_once(task, base_url, api_key)
        return 1.0

    transcript = await play(agent, ScriptedModel(count_turns))
    assert transcript.failure is None, transcript.failure
    assert transcript.score == 1.0


async def test_a_body_that_does_not_come_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl.agents.gateway.server, "REQUEST_S", 0.5)

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        for key, status in ((api_key, b"408"), ("wrong", b"401")):
            reader, writer = await connect(base_url)
            path = httpx.URL(base_url).path
            head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            writer.write(f"{head}Content-Length: 1000000\r\n\r\n".encode())
            assert (await read_end(reader)).split()[1] == status
        await ask_once(task, base_url, api_key)
        return 1.0

    assert (await play(agent, ScriptedModel(count_turns))).score == 1.0


async def test_requests_of_an_episode_at_once_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl.agents.gateway.session, "MAX_RUNNING", 4)
    full = asyncio.Event()

    async def wait(index: int) -> None:
        await full.wait()

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        async with open_client(base_url, api_key, max_retries=0) as client:
            asking = [
                asyncio.ensure_future(client.chat.completions.create(model="any", messages=task.messages))
                for _ in range(6)
            ]
            refused = 0
            while refused < 2:
                done, _ = await asyncio.wait(asking, timeout=30, return_when=asyncio.FIRST_EXCEPTION)
                refused = sum(isinstance(each.exception(), openai.RateLimitError) for each in done)
            loop.call_soon_threadsafe(full.set)
            await asyncio.wait(asking)
        return float(refused)

    loop, model = asyncio.get_running_loop(), ScriptedModel(count_turns, gate=wait)
    transcript = await play(agent, model)
    assert transcript.score == 2.0
    assert len(model.requests) == 4


async def fail_in_agent(task: Task, base_url: str, api_key: str) -> float:
    raise KeyError("no such file")


async def exit_agent(task: Task, base_url: str, api_key: str) -> float:
    raise SystemExit(3)


def exit_synchronously(task: Task, base_url: str, api_key: str) -> float:
    raise SystemExit(3)


async def cancel_itself(task: Task, base_url: str, api_key: str) -> float:
    raise asyncio.CancelledError


async def return_text(task: Task, base_url: str, api_key: str) -> Any:
    await ask_once(task, base_url, api_key)
    return "42"


async def ask_nothing(task: Task, base_url: str, api_key: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (fail_in_agent, "no such file"),
        (exit_agent, "sys.exit(3)"),
        (exit_synchronously, "sys.exit(3)"),
        (cancel_itself, "CancelledError"),
        (return_text, "returned str"),
        (ask_nothing, "without a reply"),
    ],
)
async def test_an_agent_that_fails_gives_no_score(agent: Any, message: str) -> None:
    model = ScriptedModel(count_turns)
    transcript = await play(agent, model)
    assert transcript.failure is not None
    assert message in transcript.failure.message
    assert transcript.metrics["episode/attempts"] == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages"),
        ({"messages": [{"content": "?"}]}, "role"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "prefix"}]}, "last message"),
        ({"messages": [QUESTION], "max_tokens": 0}, "max_tokens"),
        ({"messages": [QUESTION], "tools": [{"type": "web_search"}]}, "tools"),
        ({"messages": [QUESTION], "functions": [LOOKUP["function"]]}, "functions"),
        ([], "object"),
    ],
)
async def test_wrong_requests_are_refused_and_change_nothing(body: Any, message: str) -> None:
    async def agent(task: Task, base_url: str, api_key: str) -> float:
        headers = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=headers) as client:
            response = await client.post(f"{base_url}/chat/completions", json=body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
        return await ask_once(task, base_url, api_key)

    model = ScriptedModel(count_turns)
    assert len(list_samples(await play(agent, model))) == len(model.requests) == 1


async def test_tools_need_a_template_that_knows_them() -> None:
    async def agent(task: Task, base_url: str, api_key: str) -> float:
        async with open_client(base_url, api_key) as client:
            with pytest.raises(openai.BadRequestError, match=r"multi_turn\.format"):
                await client.chat.completions.create(model="any", messages=task.messages, tools=[LOOKUP])
        return await ask_once(task, base_url, api_key)

    model = ScriptedModel(count_turns)
    plain = type(model.tokenizer)(
        tokenizer_object=model.tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        chat_template="{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}",
    )
    model.tokenizer = plain
    assert (await play(agent, model)).failure is None


def test_a_gateway_that_is_disabled_refuses_its_agents_at_the_start() -> None:
    model = ScriptedModel(count_turns)
    with pytest.raises(ConfigError, match=r"gateway\.enable"):
        AgentEpisode(agent_config("test", gateway={"enable": False}), model.tokenizer, agent=ask_once)
    with pytest.raises(ConfigError, match="api_key"):
        AgentEpisode(agent_config(agent="test"), model.tokenizer, agent=lambda task, base_url: None)


async def test_workers_of_one_machine_take_different_ports() -> None:
    first = verl.agents.gateway.server.bind_socket("127.0.0.1", 0)
    port = first.getsockname()[1]
    second = verl.agents.gateway.server.bind_socket("127.0.0.1", port)
    assert second.getsockname()[1] > port
    first.close()
    second.close()


async def test_a_gateway_on_all_addresses_names_one_and_is_reached_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.com")
    monkeypatch.delenv("no_proxy", raising=False)
    urls: list[str] = []

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        urls.append(base_url)
        return await ask_once(task, base_url, api_key)

    assert len(list_samples(await play(agent, ScriptedModel(count_turns), gateway={"host": "0.0.0.0"}))) == 1
    assert "0.0.0.0" not in urls[0]
    assert os.environ["NO_PROXY"].startswith("example.com,")
