"""Replies of servers are read up to a limit of bytes and never decompressed; long messages are not tokenized."""

import asyncio
import gzip
import json
import sys
import threading
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from raw_server import Reply, send, send_without_end, serve
from scripted_model import ScriptedModel

from verl.agents import chat_model
from verl.agents.chat_model import LONG, ChatModel
from verl.agents.errors import EpisodeLimitError, ToolFailureError
from verl.agents.rendering import ChatRenderer
from verl.agents.tools.json_servers import MAX_REPLY_BYTES, JsonSession, read_reply
from verl.agents.tools.mcp_servers import HttpServer, McpServer, McpSession, StdioServer
from verl.types import SamplingParams

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

BOMB = gzip.compress(json.dumps({"result": "x" * (64 << 20)}).encode())

HOSTILE: dict[str, tuple[Callable[[], Reply], str]] = {
    "compressed": (lambda: ({"content-encoding": "gzip"}, send(BOMB)), "compresses its replies"),
    "endless": (lambda: ({}, send_without_end()), "more than 8,388,608 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_reply_of_a_json_server_is_refused_without_reading_it(name: str) -> None:
    make_reply, message = HOSTILE[name]
    async with serve(lambda request: make_reply()) as url:
        tracemalloc.start()
        with pytest.raises(ToolFailureError, match=message):
            await JsonSession(url).call("lookup", {})
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_REPLY_BYTES
        tracemalloc.stop()


async def test_servers_are_asked_not_to_compress_and_replies_below_the_limit_are_read() -> None:
    async with serve(lambda request: ({}, send(json.dumps({"result": "x" * 5_000_000}).encode()))) as url:
        assert len((await JsonSession(url).call("lookup", {})).text) == 5_000_000


INITIALIZED = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}


def reply_as_mcp(hostile: Callable[[], Reply]) -> Callable[[Mapping[str, Any]], Reply]:
    """Return a server that opens a session, and is hostile when a tool is called."""

    def reply(request: Mapping[str, Any]) -> Reply:
        if request.get("method") == "tools/call":
            headers, body = hostile()
            return {"content-type": "application/json", **headers}, body
        result = {"jsonrpc": "2.0", "id": request.get("id"), "result": INITIALIZED}
        return {"content-type": "application/json"}, send(json.dumps(result).encode())

    return reply


async def call(server: McpServer) -> None:
    session = McpSession(server)
    try:
        await asyncio.wait_for(session.call("lookup", {}), 60)
    finally:
        await session.close()


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_reply_of_an_mcp_server_is_refused_without_reading_it(name: str, kind: str) -> None:
    make_reply, message = HOSTILE[name]

    def hostile() -> Reply:
        headers, body = make_reply()
        return {"content-type": kind, **headers}, body

    async with serve(reply_as_mcp(hostile)) as url:
        tracemalloc.start()
        with pytest.raises(ToolFailureError) as raised:
            await call(HttpServer(url))
        assert tracemalloc.get_traced_memory()[1] < 12 * MAX_REPLY_BYTES
        tracemalloc.stop()
    if kind == "application/json":
        assert message.rstrip("s") in str(raised.value)


STDIO_SERVER = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request.get("method") == "tools/call":
        while True:
            sys.stdout.write("x" * 65536)
    if "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": RESULT}), flush=True)
"""


async def test_a_line_of_a_process_that_does_not_end_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(STDIO_SERVER.replace("RESULT", repr(INITIALIZED)))
    with pytest.raises(ToolFailureError, match="more than 8,388,608 bytes"):
        await call(StdioServer("hostile", sys.executable, [str(program)]))


@pytest.mark.parametrize("digits", [310, 4000])
def test_a_reward_that_no_float_can_hold_is_a_failure(digits: int) -> None:
    import httpx

    with pytest.raises(ToolFailureError, match="not a finite number"):
        read_reply(httpx.Response(200, content='{"result": "7", "reward": 1%s}' % ("0" * digits)))


def make_model(model: ScriptedModel, renderer: ChatRenderer, max_tokens: int) -> ChatModel:
    return ChatModel(model.generate, renderer, SamplingParams(max_tokens=100), None, max_sequence_tokens=max_tokens)


async def test_messages_that_are_certainly_too_long_are_refused_before_they_are_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ScriptedModel(lambda prompt: "yes")
    chat = make_model(model, renderer := ChatRenderer(model.tokenizer), 1000)
    monkeypatch.setattr(ChatRenderer, "render_prompt", lambda *args: pytest.fail("was tokenized"))
    for content in ("x" * (1000 * renderer.longest_token + 1), [{"type": "text", "text": "x" * 100_000_000}]):
        with pytest.raises(EpisodeLimitError, match="have more than 1,000 tokens"):
            await chat.chat([{"role": "user", "content": content}])


SHORT = [{"role": "user", "content": "a"}]
LARGE: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "text": ([{"role": "user", "content": "a " * LONG}], {}),
    "messages": ([{"role": "user"} for _ in range(1000)], {}),
    "key": (SHORT, {"a" * LONG: 1}),
    "numbers": (SHORT, {"enum": [1.5] * 1000}),
    "large integers": (SHORT, {"enum": [10**4000] * 50}),
}


@pytest.mark.parametrize("name", LARGE)
async def test_large_requests_are_rendered_and_hashed_off_the_event_loop(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_main_thread: list[bool] = []

    def record(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            in_main_thread.append(threading.current_thread() is threading.main_thread())
            return function(*args)

        return call

    monkeypatch.setattr(ChatRenderer, "render_prompt", record(ChatRenderer.render_prompt))
    for step in ("prepare_messages", "list_keys"):
        monkeypatch.setattr(chat_model, step, record(getattr(chat_model, step)))
    model = ScriptedModel(lambda prompt: "yes")
    chat = make_model(model, ChatRenderer(model.tokenizer), 1 << 20)
    chat.record(await chat.request(SHORT))
    assert set(in_main_thread) == {True}
    in_main_thread.clear()
    messages, schema = LARGE[name]
    chat.record(await chat.request(messages, [schema], parse_calls=False))
    assert set(in_main_thread) == {False}
