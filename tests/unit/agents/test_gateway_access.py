"""What the gateway accepts: keys, connections, bodies and requests; and where it listens."""

import asyncio
import itertools
import logging
import os
from typing import Any

import httpx
import openai
import pytest
from agent_config import agent_config
from gateway_agents import LOOKUP, QUESTION, ask_once, count_turns, open_client, play
from scripted_model import ScriptedModel, list_samples

import verl.agents.gateway.server
import verl.agents.gateway.session
from verl.agents.agent_episode import AgentEpisode
from verl.agents.builtin_agents import Task
from verl.errors import ConfigError

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]


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
