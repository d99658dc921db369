"""A request that the SDK sends again, or that an engine failed, is one turn."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
from gateway_agents import ask_once, count_turns, open_client, play
from openai import AsyncOpenAI
from scripted_model import ScriptedModel, list_samples

import verl.agents.gateway.server
import verl.agents.gateway.session
from verl.agents.builtin_agents import Task

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]


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
