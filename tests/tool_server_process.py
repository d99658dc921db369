"""A tool server in a process of its own, which notes all that reaches it in a file.

    python tool_server_process.py KIND EVENTS

KIND is stdio, http (MCP, replies as events), http-json (MCP, replies as JSON), http-modern (MCP without sessions) or
json (plain JSON). Servers with a port print it.
"""

import asyncio
import json
import os
import socket
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import BlobResourceContents, EmbeddedResource, ImageContent, TextContent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

EVENTS = Path(sys.argv[2])
notes: dict[str, list[str]] = defaultdict(list)  # of each session


def record(event: str, session: str) -> None:
    with EVENTS.open("a") as file:
        file.write(f"{event} {session}\n")


def get_session(context: Context) -> str:
    request = context.request_context.request
    if request is None:
        return str(os.getpid())
    meta: Any = context.request_context.meta or {}
    return request.headers.get("mcp-session-id") or meta["verl/episode"]


def make_server() -> MCPServer:
    server = MCPServer("tools", log_level="CRITICAL")

    @server.tool()
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    @server.tool()
    def note(text: str, ctx: Context) -> str:
        """Note a text and return all notes."""
        record("note", get_session(ctx))
        notes[get_session(ctx)].append(text)
        return ",".join(notes[get_session(ctx)])

    @server.tool()
    def refuse() -> str:
        """Refuse."""
        raise ToolError("out of range")

    @server.tool()
    async def wait(seconds: float, ctx: Context) -> str:
        """Wait."""
        record("wait", get_session(ctx))
        await asyncio.sleep(seconds)
        return "waited"

    @server.tool()
    async def crash(ctx: Context) -> str:
        """End the process."""
        record("crash", get_session(ctx))
        sys.stderr.write("the disk is full\n")
        sys.stderr.flush()
        os._exit(1)

    @server.tool()
    def look() -> list[Any]:
        """Return more than text."""
        blob = EmbeddedResource(resource=BlobResourceContents(uri="file:///a.bin", blob="AA==", mime_type="x/y"))
        return [TextContent(text="a picture:"), ImageContent(data="AAAA", mime_type="image/png"), blob]

    return server


class Recorder:
    """Notes sessions that clients open and close. A modern server knows no handshake."""

    def __init__(self, app: Any, is_modern: bool) -> None:
        self._app, self._is_modern = app, is_modern

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        session = dict(scope["headers"]).get(b"mcp-session-id", b"").decode()
        if scope["method"] == "DELETE":
            record("close", session)
        if scope["method"] == "POST" and self._is_modern:
            request = await receive()
            body = json.loads(request["body"])
            if body["method"] == "initialize":
                error = {"jsonrpc": "2.0", "id": body["id"], "error": {"code": -32601, "message": "unknown method"}}
                return await JSONResponse(error, 404)(scope, receive, send)
            later = receive
            first = [request]

            async def receive() -> Any:
                return first.pop() if first else await later()

        async def watch(message: Any) -> None:
            headers = dict(message.get("headers", ()))
            if message["type"] == "http.response.start" and not session and b"mcp-session-id" in headers:
                record("open", headers[b"mcp-session-id"].decode())
            await send(message)

        await self._app(scope, receive, watch)


async def list_tools(request: Request) -> Response:
    number = {"type": "number"}
    text = {"type": "object", "properties": {"text": {"type": "string"}}}
    return JSONResponse(
        [
            {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {"a": number}}},
            {"type": "function", "function": {"name": "note", "description": "Note a text.", "parameters": text}},
            *({"name": name} for name in ("refuse", "wait", "crash", "look")),
        ]
    )


async def call_tool(request: Request) -> Response:
    call = await request.json()
    name, arguments, episode = call["name"], call["arguments"], call["episode"]
    if name == "add":
        if not all(isinstance(arguments.get(key), int) for key in "ab"):
            return JSONResponse({"detail": "a and b must be integers"}, 422)
        return JSONResponse({"result": str(arguments["a"] + arguments["b"]), "reward": 0.5})
    if name == "refuse":
        return JSONResponse({"error": "out of range"})
    if name == "look":
        return JSONResponse({"result": {"a": [1, None]}})
    record(name, episode)
    if name == "crash":
        os._exit(1)
    if name == "wait":
        await asyncio.sleep(arguments["seconds"])
        return JSONResponse({"result": "waited"})
    notes[episode].append(arguments["text"])
    return JSONResponse({"result": ",".join(notes[episode])})


def main() -> None:
    kind = sys.argv[1]
    if kind == "stdio":
        record("open", str(os.getpid()))
        return make_server().run("stdio")
    if kind == "json":
        app: Any = Starlette(routes=[Route("/tools", list_tools), Route("/call", call_tool, methods=["POST"])])
    else:
        app = Recorder(make_server().streamable_http_app(json_response=kind == "http-json"), kind == "http-modern")
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listener])


if __name__ == "__main__":
    main()
