"""Tools of servers in processes of their own: MCP over stdio and HTTP, and plain JSON."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from agent_config import agent_config
from processes import children
from tiny import chat_tokenizer

from verl.agents.agent_episode import AgentEpisode
from verl.agents.errors import ToolError, ToolFailureError
from verl.agents.tools import mcp_servers
from verl.agents.tools.function_tools import Tool, call_tool
from verl.agents.tools.mcp_servers import McpSession, StdioServer
from verl.agents.tools.sources import ToolSource, load_sources
from verl.config.schema.rollout import MultiTurnConfig
from verl.errors import ConfigError
from verl.types import Completion, Prompt, SamplingParams

pytestmark = [pytest.mark.contract, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).parents[1] / "tool_server_process.py"
KINDS = ["stdio", "http", "http-json", "http-modern", "json"]
WITH_SESSIONS = ["stdio", "http", "http-json"]
WITH_PORT = ["http", "http-json", "http-modern", "json"]


class Server:
    """A server of a test: how it is set, and what has reached it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self._events = kind, folder / "events"
        self._events.touch()
        self.process: subprocess.Popen[str] | None = None
        command = [sys.executable, str(SCRIPT), kind, str(self._events)]
        if kind == "stdio":
            entry = {"command": command[0], "args": command[1:]}
            self.settings = agent_config(format="hermes", tool_config_path=write_tool_file(folder, {"tools": entry}))
            return
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        path = "" if kind == "json" else "/mcp"
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}{path}"
        self.settings = agent_config(format="hermes", tool_server=self.url)

    def load(self) -> ToolSource:
        [source] = load_sources(self.settings.actor_rollout_ref.rollout.multi_turn)
        self.clear()
        return source

    def clear(self) -> None:
        """Forget what has reached it."""
        self._events.write_text("")

    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def list_events(self, name: str) -> list[str]:
        """The sessions of all events with that name."""
        return [line.split()[1] for line in self._events.read_text().splitlines() if line.split()[0] == name]

    def kill(self) -> None:
        """Kill whatever serves now."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            return
        for process in list_stdio_processes():
            process.kill()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


def write_tool_file(folder: Path, servers: Mapping[str, Any], **options: Any) -> str:
    (folder / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    mcp = {"mcp_servers_config_path": "servers.json", **options}
    entry = {"class_name": "verl.tools.mcp_base_tool.MCPBaseTool", "config": {"type": "mcp"}, "mcp": mcp}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    return str(folder / "tools.yaml")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    made: dict[str, Server] = {}
    yield made
    for server in made.values():
        server.stop()


@pytest.fixture
def start(servers: dict[str, Server], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Server]:
    """Return a server that runs: the same for all tests, until one kills it."""

    def start_server(kind: str) -> Server:
        server = servers.get(kind)
        if server is None or server.has_ended():
            server = servers[kind] = Server(kind, tmp_path_factory.mktemp(kind))
        server.clear()
        return server

    return start_server


@asynccontextmanager
async def open_tools(source: ToolSource) -> AsyncIterator[dict[str, Tool]]:
    """The tools of an episode by their names; nothing may remain of it."""
    before = asyncio.all_tasks()
    async with source.open({}) as tools:
        yield {tool.schema["function"]["name"]: tool for tool in tools}
    await wait_until(lambda: asyncio.all_tasks() == before, 10)


def list_stdio_processes() -> list[psutil.Process]:
    """All that were started for sessions; servers with a port live on."""
    return [process for process in children() if not set(process.cmdline()) & set(WITH_PORT)]


def check_closed(server: Server) -> None:
    """All sessions have ended, each once; those of stdio are processes."""
    assert not list_stdio_processes()
    if server.kind != "stdio":
        assert sorted(server.list_events("close")) == sorted(server.list_events("open"))


async def wait_until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", KINDS)
async def test_tools_are_listed_and_called(start: Callable[[str], Server], kind: str) -> None:
    server = start(kind)
    source = server.load()
    schemas = {schema["function"]["name"]: schema["function"] for schema in source.list_schemas()}
    assert set(schemas) == {"add", "note", "refuse", "wait", "crash", "look"}
    assert schemas["note"]["description"].startswith("Note a text")
    assert schemas["note"]["parameters"]["properties"]["text"]["type"] == "string"
    assert "ctx" not in schemas["note"]["parameters"]["properties"]
    async with open_tools(source) as tools:
        result = await tools["add"].call({"a": 40, "b": 2}, 60)
        assert (result.text, result.reward) == ("42", 0.5 if kind == "json" else 0.0)
        look = (await tools["look"].call({}, 60)).text
        assert look == (
            '{"a": [1, null]}' if kind == "json" else "a picture:\n[image, image/png]\n[resource file:///a.bin, x/y]"
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_mistakes_of_the_model_come_back_as_text(start: Callable[[str], Server], kind: str) -> None:
    async with open_tools(start(kind).load()) as tools:
        with pytest.raises(ToolError, match=r"integer"):
            await tools["add"].call({"a": "many", "b": 2}, 60)
        with pytest.raises(ToolError, match="out of range"):
            await tools["refuse"].call({}, 60)
        assert (await tools["add"].call({"a": 1, "b": 1}, 60)).text == "2"  # the session goes on


@pytest.mark.parametrize("kind", KINDS)
async def test_episodes_do_not_share_state(start: Callable[[str], Server], kind: str) -> None:
    server = start(kind)
    source = server.load()

    async def play(name: str) -> str:
        async with source.open({}) as tools:
            note = next(tool for tool in tools if tool.schema["function"]["name"] == "note")
            await note.call({"text": name}, 60)
            return (await note.call({"text": "b"}, 60)).text

    assert await asyncio.gather(*map(play, "xyz")) == ["x,b", "y,b", "z,b"]
    sessions = Counter(server.list_events("note"))
    assert list(sessions.values()) == [2, 2, 2]
    if kind in WITH_SESSIONS:
        assert sorted(server.list_events("open")) == sorted(sessions)
    check_closed(server)


@pytest.mark.parametrize("kind", WITH_SESSIONS)
async def test_an_episode_without_calls_opens_no_session(start: Callable[[str], Server], kind: str) -> None:
    server = start(kind)
    async with open_tools(server.load()):
        pass
    assert server.list_events("open") == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_killed_between_calls_fails_the_episode(start: Callable[[str], Server], kind: str) -> None:
    server = start(kind)
    async with open_tools(server.load()) as tools:
        await tools["note"].call({"text": "a"}, 60)
        server.kill()
        for _ in range(2):
            with pytest.raises(ToolFailureError, match=r"server"):
                await tools["note"].call({"text": "b"}, 60)
    assert len(server.list_events("note")) == 1
    assert not list_stdio_processes()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_may_have_arrived_is_not_sent_again(start: Callable[[str], Server], kind: str) -> None:
    server = start(kind)
    async with open_tools(server.load()) as tools:
        with pytest.raises(ToolFailureError, match=r"crash: .*server"):
            await tools["crash"].call({}, 60)
    assert len(server.list_events("crash")) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_killed_during_calls_fails_them(start: Callable[[str], Server], kind: str) -> None:
    server = start(kind)
    async with open_tools(server.load()) as tools:
        calls = [asyncio.create_task(tools["wait"].call({"seconds": 1000}, 60)) for _ in range(2)]
        await wait_until(lambda: len(server.list_events("wait")) == 2)
        server.kill()
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [ToolFailureError, ToolFailureError]
    assert len(server.list_events("wait")) == 2


@asynccontextmanager
async def cut_calls(url: str, text: bytes) -> AsyncIterator[str]:
    """A URL that leads to the same server. A connection that has carried `text` to it never gets a reply."""
    target = httpx.URL(url)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_reply: bool, cut: list[bool]) -> None:
        while chunk := await reader.read(1 << 16):
            if is_reply and cut:
                return
            writer.write(chunk)
            await writer.drain()
            if not is_reply and text in chunk:
                cut.append(True)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cut: list[bool] = []
        upstream_reader, upstream_writer = await asyncio.open_connection(target.host, target.port)
        there = asyncio.create_task(pump(reader, upstream_writer, False, cut))
        with contextlib.suppress(ConnectionError):
            await pump(upstream_reader, writer, True, cut)
        there.cancel()
        await asyncio.wait([there])
        writer.transport.abort()
        upstream_writer.transport.abort()

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield str(target.copy_with(port=proxy.sockets[0].getsockname()[1]))
    proxy.close()


@pytest.mark.parametrize("kind", WITH_PORT)
async def test_a_call_whose_reply_is_lost_is_not_sent_again(start: Callable[[str], Server], kind: str) -> None:
    """The server lives on, so that a second attempt would arrive. Its session is closed, too."""
    server = start(kind)
    async with cut_calls(server.url, b"good bye") as url:
        source = await asyncio.to_thread(lambda: load_sources(MultiTurnConfig(tool_server=url))[0])
        server.clear()
        async with source.open({}) as tools:
            note = next(tool for tool in tools if tool.schema["function"]["name"] == "note")
            assert (await note.call({"text": "hello"}, 60)).text == "hello"
            with pytest.raises(ToolFailureError, match=r"note: the .*server"):
                await note.call({"text": "good bye"}, 60)
    assert len(server.list_events("note")) == 2
    check_closed(server)
    assert len(server.list_events("open")) == (1 if kind in WITH_SESSIONS else 0)


async def test_the_last_output_of_a_process_that_ended_is_shown(start: Callable[[str], Server]) -> None:
    async with open_tools(start("stdio").load()) as tools:
        with pytest.raises(ToolFailureError, match=r"crash: the MCP server tools: .*the disk is full"):
            await tools["crash"].call({}, 60)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_exceeds_its_timeout_leaves_nothing_behind(start: Callable[[str], Server], kind: str) -> None:
    server = start(kind)
    async with open_tools(server.load()) as tools:
        await tools["add"].call({"a": 1, "b": 1}, 60)
        with pytest.raises(ToolFailureError, match=r"wait did not return within 0.5 s"):
            await call_tool(tools, "wait", {"seconds": 1000}, 0.5)
    assert len(server.list_events("wait")) <= 1
    check_closed(server)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_episode_leaves_nothing_behind(start: Callable[[str], Server], kind: str) -> None:
    server = start(kind)
    source = server.load()
    before = asyncio.all_tasks()

    async def play() -> None:
        async with source.open({}) as tools:
            wait = next(tool for tool in tools if tool.schema["function"]["name"] == "wait")
            await wait.call({"seconds": 1000}, 60)

    playing = asyncio.create_task(play())
    await wait_until(lambda: len(server.list_events("wait")) == 1)
    for _ in range(3):  # also while it closes its session
        playing.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([playing])
    assert playing.cancelled()
    await wait_until(lambda: asyncio.all_tasks() == before)
    check_closed(server)


async def test_a_session_that_is_still_opening_is_ended_with_its_episode(tmp_path: Path) -> None:
    """A process that never says anything, and does not end when its input does."""
    program = "import time, sys, pathlib; pathlib.Path(sys.argv[1]).touch(); time.sleep(1000)"
    session = McpSession(StdioServer("mute", sys.executable, ["-c", program, str(tmp_path / "started")]))
    call = asyncio.create_task(session.call("add", {}))
    await wait_until((tmp_path / "started").exists)
    before = time.monotonic()
    await session.close()
    assert time.monotonic() - before < 14
    with pytest.raises(ToolFailureError, match="the MCP server mute: the session is closed"):
        await call
    assert not list_stdio_processes()


def list_connections() -> set[Any]:
    """Return the open connections of this process, which other tests share."""
    return {each for each in psutil.Process().net_connections("tcp") if each.status == "ESTABLISHED"}


@pytest.mark.rotating(1)
@pytest.mark.parametrize("kind", ["http", "http-json", "json"])
async def test_fifty_episodes_at_once(start: Callable[[str], Server], kind: str) -> None:
    server = start(kind)
    source = server.load()
    before, connections = asyncio.all_tasks(), list_connections()

    async def play(index: int) -> str:
        async with source.open({}) as tools:
            note = next(tool for tool in tools if tool.schema["function"]["name"] == "note")
            await note.call({"text": str(index)}, 60)
            return (await note.call({"text": "end"}, 60)).text

    assert await asyncio.gather(*map(play, range(50))) == [f"{index},end" for index in range(50)]
    assert list(Counter(server.list_events("note")).values()) == [2] * 50
    assert asyncio.all_tasks() == before
    check_closed(server)
    assert len(server.list_events("open")) == (0 if kind == "json" else 50)
    assert list_connections() <= connections


async def test_an_episode_waits_until_a_process_is_free(
    start: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_servers, "MAX_PROCESSES", 2)
    source, most = start("stdio").load(), 0

    async def play(number: int) -> None:
        nonlocal most
        async with source.open({}) as tools:
            note = next(tool for tool in tools if tool.schema["function"]["name"] == "note")
            await note.call({"text": str(number)}, 60)
            most = max(most, len(list_stdio_processes()))

    await asyncio.gather(*(play(number) for number in range(6)))
    assert most == 2
    assert not list_stdio_processes()


def test_a_server_that_does_not_run_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    before = time.monotonic()
    with pytest.raises(ConfigError, match=rf"multi_turn.tool_server: the tool server {url} cannot be reached: .*start"):
        load_sources(MultiTurnConfig(tool_server=url))
    assert time.monotonic() - before < 10


@pytest.mark.rotating(2)
def test_a_server_that_never_replies_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.agents.tools.servers.START_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"the tool server {url} did not list its tools within 1 s; start"):
            load_sources(MultiTurnConfig(tool_server=url))


async def test_tools_are_listed_while_a_loop_runs(start: Callable[[str], Server]) -> None:
    assert len(start("json").load().list_schemas()) == 6


@pytest.mark.parametrize("kind", ["http", "http-json"])
async def test_the_path_of_an_mcp_server_may_be_left_out(start: Callable[[str], Server], kind: str) -> None:
    [source] = load_sources(MultiTurnConfig(tool_server=start(kind).url.removesuffix("/mcp")))
    async with open_tools(source) as tools:
        assert (await tools["add"].call({"a": 1, "b": 1}, 60)).text == "2"


def test_a_server_of_neither_protocol_is_refused(start: Callable[[str], Server]) -> None:
    url = f"{start('json').url}/elsewhere"
    with pytest.raises(ConfigError, match=r"speaks neither MCP nor plain JSON \(.*HTTP 404.*HTTP 404"):
        load_sources(MultiTurnConfig(tool_server=url))


def test_without_the_package_mcp_plain_json_works(
    start: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    server = start("json")
    assert len(server.load().list_schemas()) == 6
    hint = r'MCP servers need the package mcp: pip install -e "\.\[agents\]"'
    with pytest.raises(ConfigError, match=hint):
        load_sources(MultiTurnConfig(tool_server=f"{server.url}/elsewhere"))
    with pytest.raises(ConfigError, match=hint):
        load_sources(MultiTurnConfig(tool_config_path=write_tool_file(tmp_path, {"a": {"url": server.url}})))


def test_all_servers_of_a_file_that_fail_are_reported(tmp_path: Path) -> None:
    servers = {
        "missing": {"command": "no-such-program"},
        "broken": {"command": sys.executable, "args": ["-c", "raise SystemExit('no license')"]},
        "silent": {"url": "http://127.0.0.1:9/mcp", "auth_token": "abc"},
    }
    with pytest.raises(ConfigError) as caught:
        load_sources(MultiTurnConfig(tool_config_path=write_tool_file(tmp_path, servers)))
    missing, broken, silent = caught.value.problems
    assert "tool_config_path" in missing
    assert "the MCP server missing: FileNotFoundError" in missing
    assert "the MCP server broken: " in broken
    assert "no license" in broken
    assert "the MCP server silent at http://127.0.0.1:9/mcp: ConnectError" in silent
    assert not list_stdio_processes()


def test_the_selected_tools_of_a_file(start: Callable[[str], Server], tmp_path: Path) -> None:
    entry = {"url": start("http").url, "headers": {"X-Key": "k"}}
    [source] = load_sources(
        MultiTurnConfig(tool_config_path=write_tool_file(tmp_path, {"a": entry}, tool_selected_list=["wait", "add"]))
    )
    assert [schema["function"]["name"] for schema in source.list_schemas()] == ["add", "wait"]
    with pytest.raises(ConfigError, match=r"no server has the tool 'ad' of tool_selected_list; there are: add, note"):
        load_sources(
            MultiTurnConfig(tool_config_path=write_tool_file(tmp_path, {"a": entry}, tool_selected_list=["ad"]))
        )
    with pytest.raises(ConfigError, match=r"there are two tools 'add'"):
        load_sources(MultiTurnConfig(tool_config_path=write_tool_file(tmp_path, {"a": entry, "b": entry})))


class Script:
    """A model that says what is written, whatever it is asked."""

    def __init__(self, *replies: str) -> None:
        self._replies, self._tokenizer = list(replies), chat_tokenizer()
        self.requests: list[str] = []

    async def __call__(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        self.requests.append(self._tokenizer.decode(token_ids))
        ids = self._tokenizer(self._replies.pop(0) + "<|end|>", add_special_tokens=False)["input_ids"]
        return Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop")


def write_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PROMPT = Prompt(row=0, token_ids=[], raw=[{"role": "user", "content": "What is 40 + 2?"}])


@pytest.mark.parametrize("kind", KINDS)
async def test_an_episode_calls_tools_of_a_server(start: Callable[[str], Server], kind: str) -> None:
    server = start(kind)
    episode = AgentEpisode(server.settings, chat_tokenizer())
    model = Script(write_call("add", a=40, b=2), write_call("refuse"), "It is 42.")
    transcript = await episode(PROMPT, model, SamplingParams(max_tokens=4000))
    assert transcript.failure is None
    assert "42" in model.requests[1]
    assert "Error: " in model.requests[2]
    assert transcript.metrics["tools/calls"] == 2.0
    assert transcript.metrics["tools/invalid_calls"] == 1.0
    assert sum(turn.reward for turn in transcript.turns) == (0.5 if kind == "json" else 0.0)


@pytest.mark.parametrize("kind", ["stdio", "json"])
async def test_an_episode_is_repeated_and_then_fails_if_its_server_does(
    start: Callable[[str], Server], kind: str
) -> None:
    server = start(kind)
    episode = AgentEpisode(server.settings, chat_tokenizer())
    model = Script(*[write_call("crash")] * 2)
    transcript = await episode(PROMPT, model, SamplingParams(max_tokens=4000))
    assert transcript.failure is not None
    assert "server" in transcript.failure.message
    assert transcript.metrics["episode/attempts"] == 2.0
    assert len(set(server.list_events("crash"))) == len(server.list_events("crash")) == (2 if kind == "stdio" else 1)


async def test_an_episode_that_exceeds_its_timeout_ends_its_session(start: Callable[[str], Server]) -> None:
    server = start("http")
    settings = agent_config(format="hermes", tool_server=server.url, deadline_s=2.0)
    episode = AgentEpisode(settings, chat_tokenizer())
    before = asyncio.all_tasks()
    transcript = await episode(PROMPT, Script(write_call("wait", seconds=1000)), SamplingParams(max_tokens=4000))
    assert transcript.is_truncated
    await wait_until(lambda: asyncio.all_tasks() == before)
    check_closed(server)
