"""What tool servers say, and what files say about them. No server runs here."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp.types import AudioContent, CallToolResult, EmbeddedResource, ResourceLink, TextContent, TextResourceContents

from verl.agents.errors import ToolError, ToolFailureError
from verl.agents.tools.json_servers import JsonSession, read_reply, to_schema
from verl.agents.tools.mcp_servers import HttpServer, StdioServer, limit_body, read_result
from verl.agents.tools.results import ToolResult
from verl.agents.tools.servers import load_mcp_servers, load_tool_server, read_servers_file
from verl.errors import ConfigError

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]


def reply(status: int, body: Any) -> httpx.Response:
    return httpx.Response(status, content=body if isinstance(body, (bytes, str)) else json.dumps(body))


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ({"result": "7"}, ToolResult("7")),
        ({"result": "7", "reward": 1}, ToolResult("7", 1.0)),
        ({"result": {"a": [1]}, "error": None, "reward": None}, ToolResult('{"a": [1]}')),
        ({"result": None}, ToolResult("null")),
        ('{"result": "\\ud800"}', ToolResult("?")),
    ],
)
def test_results_are_read_with_their_rewards(body: Any, result: ToolResult) -> None:
    assert read_reply(reply(200, body)) == result


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (200, {"error": "no such key"}, "no such key"),
        (200, {"error": {"code": 3}}, '{"code": 3}'),
        (200, {"error": ""}, "^$"),
        (400, {"error": "no such key"}, "no such key"),
        (404, {"error": "no such key"}, "no such key"),
        (422, {"detail": "a is missing"}, "a is missing"),
        (400, "", "HTTP 400"),
    ],
)
def test_mistakes_of_the_model_are_tool_errors(status: int, body: Any, text: str) -> None:
    with pytest.raises(ToolError, match=text):
        read_reply(reply(status, body))


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, {"error": "no such key"}),
        (503, "busy"),
        (302, ""),
        (401, {"detail": "no token"}),
        (404, {"detail": "Not Found"}),
        (429, "slow down"),
        (200, "hello"),
        (200, {"answer": 7}),
        (200, [7]),
        (200, "[" * 100_000),
        (200, {"result": "7", "reward": "much"}),
        (200, {"result": "7", "reward": True}),
        (200, '{"result": "7", "reward": NaN}'),
    ],
)
def test_failures_of_the_server_are_tool_failures(status: int, body: Any) -> None:
    with pytest.raises(ToolFailureError):
        read_reply(reply(status, body))


@pytest.mark.parametrize("charset", ["punycode", "idna", "zlib"])
async def test_replies_are_never_decoded_by_a_charset_that_the_server_names(charset: str) -> None:
    import httpx2

    headers, body = {"content-type": f"text/plain; charset={charset}"}, b"x" * 2000 + b"-\xff"
    with pytest.raises(ToolFailureError, match="returned HTTP 500: xxx"):
        read_reply(httpx.Response(500, headers=headers, content=body))

    class Body(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield body

    response = httpx2.Response(200, headers=headers, stream=Body())
    limit_body(response)
    assert "".join([text async for text in response.aiter_text()]) == body.decode(errors="replace")


def test_schemas_of_plain_servers_are_read_in_both_forms() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    whole = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": parameters}}
    assert to_schema(whole) == whole
    for key in ("parameters", "input_schema", "inputSchema"):
        assert to_schema({"name": "add", "description": "Add.", key: parameters}) == whole
    assert to_schema({"name": "go"})["function"]["parameters"] == {"type": "object", "properties": {}}
    for bad in ("add", {"description": "Add."}, {"name": "add", "parameters": "a"}):
        with pytest.raises(ToolFailureError, match=r"GET /tools (returned|did not return)"):
            to_schema(bad)


def test_paths_keep_the_query_of_the_url() -> None:
    assert str(JsonSession("http://host:1/v1/?key=2").join("call")) == "http://host:1/v1/call?key=2"


def test_results_of_mcp_servers_become_text() -> None:
    blocks = [
        TextContent(text="a"),
        AudioContent(data="", mime_type="audio/wav"),
        EmbeddedResource(resource=TextResourceContents(uri="file:///a", text="inside")),
        ResourceLink(name="b", uri="file:///b"),
    ]
    assert read_result(CallToolResult(content=blocks)).text == "a\n[audio, audio/wav]\ninside\n[resource file:///b]"
    assert read_result(CallToolResult(content=[], structured_content={"a": 1})).text == '{"a": 1}'
    assert read_result(CallToolResult(content=[])).text == ""
    with pytest.raises(ToolError, match="the tool reports an error"):
        read_result(CallToolResult(content=[], is_error=True))


@pytest.mark.parametrize("url", ["tool-server:8080", "ftp://host/", "http://", "http://host:many", "host"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"multi_turn\.tool_server: .* is not .*; set it to http://host:port"):
        load_tool_server(url, "multi_turn.tool_server")


def write(folder: Path, content: Any) -> str:
    path = folder / "servers.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path.name


def test_servers_are_read_from_a_file(tmp_path: Path) -> None:
    entries = {
        "files": {"command": "npx", "args": ["-y", "files", 3], "env": {"A": 1}, "cwd": "/tmp"},
        "plain": {"type": "http", "url": "http://host/mcp"},
        "search": {"url": "http://host/search", "headers": {"X": "y"}, "auth_token": "abcdefgh12345678"},
    }
    servers = read_servers_file(write(tmp_path, {"mcpServers": entries}), "here", tmp_path)
    assert servers == [
        StdioServer("files", "npx", ["-y", "files", "3"], {"A": "1"}, "/tmp"),
        HttpServer("http://host/mcp", {}, "plain"),
        HttpServer("http://host/search", {"X": "y", "Authorization": "Bearer abcdefgh12345678"}, "search"),
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "has no servers"),
        ({"mcpServers": {}}, "has no servers"),
        ({"mcpServers": {"a": {}}}, "the server a needs a command"),
        ({"mcpServers": {"a": "npx"}}, "the server a needs a command"),
        ({"mcpServers": {"a": {"type": "sse", "url": "http://host"}}}, "other transports are refused"),
        ({"mcpServers": {"a": {"url": "http://host", "headers": "X"}}}, "the entry of the server a cannot be read"),
    ],
)
def test_a_file_without_servers_is_refused(tmp_path: Path, content: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"here: .*{problem}"):
        read_servers_file(write(tmp_path, content), "here", tmp_path)


def test_an_incomplete_entry_of_a_tool_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"here: a tool of type mcp needs mcp\.mcp_servers_config_path"):
        load_mcp_servers({"config": {"type": "mcp"}}, "here", tmp_path)
    with pytest.raises(ConfigError, match=r"here: mcp_servers_config_path=none\.json cannot be read"):
        load_mcp_servers({"mcp": {"mcp_servers_config_path": "none.json"}}, "here", tmp_path)
    with pytest.raises(ConfigError, match=r"here: my\.Tool cannot be the class of an MCP tool; remove class_name"):
        load_mcp_servers({"class_name": "my.Tool"}, "here", tmp_path)
