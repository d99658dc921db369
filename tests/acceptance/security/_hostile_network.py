"""Attacks of show-hostile-agents over the network: by tool servers, and by requests to the gateway."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import mcp.client.streamable_http  # noqa: F401 - workers import it when they start, which takes a second
from agent_config import agent_config
from raw_server import Reply, send, send_without_end, serve
from scripted_model import ScriptedModel

from verl.agents.agent_episode import AgentEpisode
from verl.agents.builtin_agents import Task
from verl.agents.errors import ToolError, ToolFailureError
from verl.agents.gateway import server
from verl.agents.gateway.session import MAX_RUNNING
from verl.agents.tools import mcp_servers
from verl.agents.tools.json_servers import JsonSession, create_ssl_context
from verl.agents.tools.mcp_servers import HttpServer, McpServer, McpSession, StdioServer
from verl.agents.tools.servers import ServerSource, ServerTool
from verl.agents.transcript import Transcript
from verl.agents.user_code import run_with_timeout
from verl.config.paths import change_settings
from verl.config.schema import Config
from verl.types import Prompt, SamplingParams

create_ssl_context()
HELD_S = 30.0  # at most, on a busy machine; the servers would go on for ever
INITIALIZED = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}


def make_bomb() -> bytes:
    """Return 1 GiB of JSON as one megabyte of gzip."""
    compressor = gzip.zlib.compressobj(9, gzip.zlib.DEFLATED, 31)
    parts = [compressor.compress(b'{"result": "'), *(compressor.compress(b"x" * (1 << 20)) for _ in range(1024))]
    return b"".join([*parts, compressor.compress(b'"}'), compressor.flush()])


async def drip() -> AsyncIterator[bytes]:
    while True:
        yield b" "
        await asyncio.sleep(0.1)


def nested() -> Reply:
    return {}, send(b'{"result": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}")


BOMB = make_bomb()
BODIES: dict[str, Callable[[], Reply]] = {
    "a compressed reply of 1 GiB": lambda: ({"content-encoding": "gzip"}, send(BOMB)),
    "a reply without end": lambda: ({}, send_without_end()),
    "a reply in drops": lambda: ({}, drip()),
    "a deeply nested reply": nested,
}
REWARDS = ("NaN", "1e400", "1" + "0" * 400, "true", '"1"')


async def expect_failure(call: Awaitable[Any]) -> None:
    start = time.monotonic()
    try:
        result = await run_with_timeout(call, 2.0, "the tool")
        raise AssertionError(f"the call returned {str(result)[:60]}")
    except (ToolFailureError, ToolError):
        assert time.monotonic() - start < HELD_S, f"{time.monotonic() - start:.1f} s at a limit of 2 s"


async def try_json(make_reply: Callable[[], Reply]) -> None:
    async with serve(lambda request: make_reply()) as url:
        await expect_failure(JsonSession(url).call("lookup", {}))


async def send_reward(reward: str) -> None:
    await try_json(lambda: ({}, send(f'{{"result": "", "reward": {reward}}}'.encode())))


async def try_session(server: McpServer) -> None:
    session = McpSession(server)
    try:
        await expect_failure(session.call("lookup", {}))
    finally:
        await session.close()


async def try_mcp(make_reply: Callable[[], Reply], content_type: str) -> None:
    def reply(request: Mapping[str, Any]) -> Reply:
        if request.get("method") == "tools/call":
            headers, body = make_reply()
            return {"content-type": content_type, **headers}, body
        result = {"jsonrpc": "2.0", "id": request.get("id"), "result": INITIALIZED}
        return {"content-type": "application/json"}, send(json.dumps(result).encode())

    async with serve(reply) as url:
        await try_session(HttpServer(url))


STDIO = """
import json, os, signal, sys, time
open(os.path.join(FOLDER, str(os.getpid())), "w").close()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if KIND == "silent":
    time.sleep(3600)
for line in sys.stdin:
    request = json.loads(line)
    if request.get("method") == "tools/call":
        while KIND == "endless":
            sys.stdout.write("x" * 65536)
        if KIND == "stuck":
            time.sleep(3600)
    if "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": RESULT}), flush=True)
"""


def list_alive(folder: Path) -> list[int]:
    """Return the processes that a hostile server has started and that run."""
    alive = []
    for file in folder.glob("[0-9]*"):
        with suppress(ProcessLookupError):
            os.kill(int(file.name), 0)
            alive.append(int(file.name))
    return alive


def write_server(folder: Path, kind: str) -> StdioServer:
    result = {**INITIALIZED, "content": [], "tools": []}
    values = f"FOLDER, KIND, RESULT = {str(folder)!r}, {kind!r}, {result!r}\n"
    (folder / "server.py").write_text(values + STDIO)
    return StdioServer("hostile", sys.executable, [str(folder / "server.py")])


async def try_stdio(kind: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        await try_session(write_server(Path(name), kind))
        assert not list_alive(Path(name)), "a process is left"


async def use_up_processes() -> None:
    """12 episodes call a server that gets stuck: only 3 processes may run at once, and none may be left."""
    limit, most = 3, 0
    with tempfile.TemporaryDirectory() as name:
        server = write_server(Path(name), "stuck")
        schema = {"type": "function", "function": {"name": "lookup", "parameters": {}}}
        source = ServerSource(lambda: McpSession(server), [schema], limit)

        async def play() -> None:
            nonlocal most
            async with source.open({}) as [tool]:
                assert isinstance(tool, ServerTool)
                with suppress(ToolFailureError):
                    await tool.call({}, 1.0)
                most = max(most, len(list_alive(Path(name))))

        await asyncio.gather(*(play() for _ in range(12)))
        assert 1 <= most <= limit, f"{most} processes at once"
        assert not list_alive(Path(name)), "a process is left"
    assert mcp_servers.McpSession(server).max_sessions == mcp_servers.MAX_PROCESSES


JSON, EVENTS = "application/json", "text/event-stream"
SERVER_ATTACKS: dict[str, Callable[[], Awaitable[None]]] = {
    **{f"a JSON server sends {name}": partial(try_json, make) for name, make in BODIES.items()},
    **{f"an MCP server sends {name}": partial(try_mcp, make, JSON) for name, make in BODIES.items()},
    **{f"an MCP server sends {name} as an event": partial(try_mcp, make, EVENTS) for name, make in BODIES.items()},
    **{f"a JSON server rewards with {each[:8]}": partial(send_reward, each) for each in REWARDS},
    "a process sends a line without end": lambda: try_stdio("endless"),
    "a process never opens its session": lambda: try_stdio("silent"),
    "a process gets stuck in a call": lambda: try_stdio("stuck"),
    "episodes use up processes": use_up_processes,
}


# ---- requests to the gateway

MESSAGES = [{"role": "user", "content": "Go."}]
REQUEST_S = 4.0  # instead of 30
Agent = Callable[["Client"], Awaitable[None]]


class Client:
    """What an agent, or code that it runs, can send."""

    def __init__(self, base_url: str, api_key: str, reward_key: str) -> None:
        self.base_url, self.api_key, self.reward_key = base_url, api_key, reward_key

    async def post(self, path: str, body: Any, key: str, **options: Any) -> httpx.Response:
        content = body if isinstance(body, (str, bytes)) else json.dumps(body)
        async with httpx.AsyncClient(timeout=60, verify=False) as client:
            headers = {"Authorization": f"Bearer {key}", **options.pop("headers", {})}
            return await client.post(self.base_url + path, content=content, headers=headers, **options)

    async def ask(self) -> httpx.Response:
        response = await self.post("/chat/completions", {"messages": MESSAGES}, self.api_key)
        assert response.status_code == 200, response.text
        return response

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = httpx.URL(self.base_url)
        return await asyncio.open_connection(url.host, url.port)


async def play(attack: Agent, config: Config | None = None, gate: Any = None) -> Transcript:
    """Play an episode whose agent asks the model once, attacks, and returns no score. It has to end without failure."""
    failures: list[BaseException] = []

    async def agent(task: Task, base_url: str, api_key: str, reward_key: str) -> None:
        client = Client(base_url, api_key, reward_key)
        try:
            if gate is None:
                await client.ask()
            await attack(client)
        except BaseException as error:
            failures.append(error)
            raise

    model = ScriptedModel(lambda prompt: "yes", gate)
    episode = AgentEpisode(config or agent_config(agent="test"), model.tokenizer, agent=agent)
    try:
        transcript = await episode(Prompt(0, [1], raw=MESSAGES), model.generate, SamplingParams(max_tokens=400))
    finally:
        await episode.close()
    if failures:
        raise failures[0]
    assert transcript.failure is None, transcript.failure
    return transcript


async def read_end(reader: asyncio.StreamReader) -> bytes:
    """Return what the server sends until it closes the connection, which it has to do in time."""
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""
    except TimeoutError:
        raise AssertionError("the connection is still open") from None


async def set_the_score_with_the_key_for_requests() -> None:
    async def attack(client: Client) -> None:
        for path in ("/reward", "/../reward"):
            assert (await client.post(path, {"reward": 1.0}, client.api_key)).status_code in (401, 404)

    assert (await play(attack)).score is None


async def ask_with_the_key_for_rewards() -> None:
    async def attack(client: Client) -> None:
        body = {"messages": MESSAGES}
        assert (await client.post("/chat/completions", body, client.reward_key)).status_code == 401

    assert len((await play(attack)).turns) == 1


async def set_the_score_of_a_run_with_a_reward() -> None:
    async def attack(client: Client) -> None:
        assert (await client.post("/reward", {"reward": 1.0}, client.reward_key)).status_code == 403

    config = change_settings(agent_config(agent="test"), {"reward.custom_reward_function.path": "reward.py"})
    assert (await play(attack, config)).score is None


async def set_a_score_without_bounds() -> None:
    async def attack(client: Client) -> None:
        for number in ("1e308", "1e400", "NaN", "-Infinity", "9" * 4000, "true", '"1"', "101", "-1e9"):
            response = await client.post("/reward", f'{{"reward": {number}}}', client.reward_key)
            assert response.status_code == 400, number

    assert (await play(attack)).score is None


async def use_another_episode() -> None:
    """Two episodes run: neither key works for the other, and numbers of episodes are not enough."""
    clients: list[Client] = []
    finished: list[Client] = []

    async def attack(client: Client) -> None:
        clients.append(client)
        while len(clients) < 2:
            await asyncio.sleep(0.01)
        other = next(each for each in clients if each is not client)
        stolen = Client(other.base_url, client.api_key, client.reward_key)
        for path, key in (("/chat/completions", client.api_key), ("/reward", client.reward_key)):
            body = {"messages": MESSAGES, "reward": 1.0}
            assert (await stolen.post(path, body, key)).status_code == 401
        finished.append(client)
        while len(finished) < 2:  # an episode that has ended would refuse any key
            await asyncio.sleep(0.01)

    async def agent(task: Task, base_url: str, api_key: str, reward_key: str) -> None:
        client = Client(base_url, api_key, reward_key)
        await client.ask()
        await attack(client)

    model = ScriptedModel(lambda prompt: "yes")
    episode = AgentEpisode(agent_config(agent="test"), model.tokenizer, agent=agent)
    prompt, sampling = Prompt(0, [1], raw=MESSAGES), SamplingParams(max_tokens=400)
    transcripts = await asyncio.gather(*(episode(prompt, model.generate, sampling) for _ in range(2)))
    await episode.close()
    assert [(each.failure, each.score, len(each.turns)) for each in transcripts] == [(None, None, 1)] * 2


async def ask_after_the_end() -> None:
    clients: list[Client] = []

    async def agent(task: Task, base_url: str, api_key: str, reward_key: str) -> float:
        clients.append(Client(base_url, api_key, reward_key))
        await clients[-1].ask()
        return 0.25

    model = ScriptedModel(lambda prompt: "yes")
    episode = AgentEpisode(agent_config(agent="test"), model.tokenizer, agent=agent)
    transcript = await episode(Prompt(0, [1], raw=MESSAGES), model.generate, SamplingParams(max_tokens=400))
    client = clients[0]
    for path, key in (("/chat/completions", client.api_key), ("/reward", client.reward_key)):
        assert (await client.post(path, {"messages": MESSAGES, "reward": 1.0}, key)).status_code == 410
    await episode.close()
    assert (transcript.score, len(transcript.turns)) == (0.25, 1)


async def hold_connections_in_silence() -> None:
    async def attack(client: Client) -> None:
        connections = [await client.connect() for _ in range(50)]
        assert await asyncio.gather(*(read_end(reader) for reader, _ in connections)) == [b""] * 50
        await client.ask()

    with mock.patch.object(server, "REQUEST_S", REQUEST_S):
        await play(attack)


async def send_headers_in_drops() -> None:
    async def attack(client: Client) -> None:
        reader, writer = await client.connect()
        writer.write(b"POST / HTTP/1.1\r\n")

        async def drip() -> None:
            while True:
                writer.write(b"a: b\r\n")
                await asyncio.sleep(0.1)

        dripping = asyncio.ensure_future(drip())
        await read_end(reader)
        dripping.cancel()
        await client.ask()

    with mock.patch.object(server, "REQUEST_S", REQUEST_S):
        await play(attack)


async def send_headers_without_end() -> None:
    async def attack(client: Client) -> None:
        reader, writer = await client.connect()
        writer.write(b"GET / HTTP/1.1\r\n")
        reading, sent = asyncio.ensure_future(read_end(reader)), 0
        while not reading.done() and sent < 1 << 28:
            writer.write(b"x: " + b"y" * 65536 + b"\r\n")
            sent += 65536
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
        assert sent < 1 << 26, "64 MiB of headers were read"
        await reading

    await play(attack)


def send_body(body: str | bytes, status: int, *, has_key: bool = True) -> Callable[[], Awaitable[None]]:
    async def attack(client: Client) -> None:
        try:
            response = await client.post("/chat/completions", body, client.api_key if has_key else "wrong")
            assert response.status_code == status, response.status_code
        except httpx.TransportError:  # closed while the body was sent
            pass
        await client.ask()

    async def run() -> None:
        assert len((await play(attack)).turns) == 2

    return run


def promise_a_body(key: str | None, status: bytes) -> Callable[[], Awaitable[None]]:
    """Announce a body that never comes."""

    async def attack(client: Client) -> None:
        reader, writer = await client.connect()
        head = f"POST {httpx.URL(client.base_url).path}/chat/completions HTTP/1.1\r\nHost: x\r\n"
        lines = f"{head}Authorization: Bearer {key or client.api_key}\r\nContent-Length: 1000000\r\n\r\n"
        writer.write(lines.encode())
        assert (await read_end(reader)).split()[1] == status
        await client.ask()

    async def run() -> None:
        with mock.patch.object(server, "REQUEST_S", REQUEST_S):
            await play(attack)

    return run


async def open_too_many_connections() -> None:
    async def attack(client: Client) -> None:
        connections = [await client.connect() for _ in range(200)]
        await asyncio.sleep(1.0)
        closed = sum(reader.at_eof() or reader.exception() is not None for reader, _ in connections)
        assert closed >= 200 - 64, f"{200 - closed} are open"
        for _, writer in connections:
            writer.close()
        await asyncio.sleep(0.5)
        await client.ask()

    with mock.patch.object(server, "MAX_CONNECTIONS", 64):
        await play(attack)


async def ask_too_often_at_once() -> None:
    """200 requests at once: at most `MAX_RUNNING` reach the engine."""
    full, most, running = asyncio.Event(), 0, 0
    loop = asyncio.get_running_loop()

    async def gate(index: int) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await full.wait()
        running -= 1

    async def attack(client: Client) -> None:
        body = {"messages": MESSAGES}
        posts = [asyncio.ensure_future(client.post("/chat/completions", body, client.api_key)) for _ in range(200)]
        while sum(each.done() for each in posts) < 200 - MAX_RUNNING:
            await asyncio.sleep(0.05)
        loop.call_soon_threadsafe(full.set)
        replies = await asyncio.gather(*posts)
        assert sorted({each.status_code for each in replies}) == [200, 429]

    await play(attack, gate=gate)
    assert most <= MAX_RUNNING, f"{most} at once"


async def name_an_episode_of_5000_digits() -> None:
    async def attack(client: Client) -> None:
        huge = Client(client.base_url.replace("/e/0/", f"/e/{'9' * 5000}/"), client.api_key, client.reward_key)
        assert (await huge.post("/chat/completions", {"messages": MESSAGES}, client.api_key)).status_code == 404

    await play(attack)


async def ask_with_100_megabytes_in_8_requests() -> None:
    """Bodies below the limit, with more text than the context holds, are refused before they are tokenized."""

    async def attack(client: Client) -> None:
        body = {"messages": [{"role": "user", "content": "x" * (7 << 20)}]}
        for _ in range(8):
            response = await client.post("/chat/completions", body, client.api_key)
            assert response.json()["error"]["code"] == "context_length_exceeded"

    config = change_settings(agent_config(agent="test"), {"data.max_response_length": 1000})
    assert (await play(attack, config)).is_truncated


NESTED = f'{{"messages": [{{"role": "user", "content": {"[" * 900 + "]" * 900}}}]}}'
ATTACKS: dict[str, Callable[[], Awaitable[None]]] = {
    **SERVER_ATTACKS,
    "set the score with the key for requests": set_the_score_with_the_key_for_requests,
    "ask with the key for rewards": ask_with_the_key_for_rewards,
    "set the score of a run with a reward": set_the_score_of_a_run_with_a_reward,
    "set a score without bounds": set_a_score_without_bounds,
    "use another episode": use_another_episode,
    "ask after the end": ask_after_the_end,
    "hold connections in silence": hold_connections_in_silence,
    "send headers in drops": send_headers_in_drops,
    "send headers without end": send_headers_without_end,
    "send a body of 64 megabytes": send_body(b"x" * (64 << 20), 413),
    "send a body of 64 megabytes without a key": send_body(b"x" * (64 << 20), 401, has_key=False),
    "send a nested body": send_body(NESTED, 400),
    "send a body that is only brackets": send_body("[" * 1_000_000, 400),
    "promise a body": promise_a_body(None, b"408"),
    "promise a body without a key": promise_a_body("wrong", b"401"),
    "open too many connections": open_too_many_connections,
    "ask too often at once": ask_too_often_at_once,
    "name an episode of 5000 digits": name_an_episode_of_5000_digits,
    "ask with more text than the context holds": ask_with_100_megabytes_in_8_requests,
}
