"""MCP servers through the official SDK: over streamable HTTP, or as processes that talk over stdin and stdout.

The SDK's cancel scopes must be exited by the task that entered them. So each session is opened, held and closed by a
task of its own, while the calls of an episode, and the end of the episode, come from other tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import anyio

from verl.agents.errors import ToolError, ToolFailureError
from verl.agents.messages import replace_surrogates
from verl.agents.tools.json_servers import (
    CONNECT_S,
    MAX_REPLY_BYTES,
    UNCOMPRESSED,
    check_size,
    create_ssl_context,
    make_schema,
    refuse_compression,
)
from verl.agents.tools.results import ToolResult, to_result
from verl.redaction import redact

if TYPE_CHECKING:
    import httpx2
    from mcp import ClientSession
    from mcp.types import CallToolResult, ContentBlock, Tool

_log = logging.getLogger(__name__)
CLOSE_S = 15.0  # the SDK gives a process 2 s to end, and 2 s after SIGTERM
DELETE_S = 5.0
MAX_PROCESSES, MAX_CONNECTIONS = 64, 1024  # of a server at once, in a worker
MAX_PAGES = 100  # pages of a list of tools
_STDERR_CHARACTERS = 600
_EPISODE = "verl/episode"  # in the metadata of calls, for servers whose protocol has no sessions
_owners: set[asyncio.Task[None]] = set()  # an event loop keeps only weak references to tasks


@dataclass(frozen=True, slots=True)
class StdioServer:
    """A program that is an MCP server, started for each session. It inherits few environment variables.

    One task must enter and exit the session of `connect`; exiting releases everything.
    """

    name: str
    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None

    @property
    def label(self) -> str:
        return f"the MCP server {self.name}"

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[ClientSession]:
        from mcp.client.stdio import StdioServerParameters, stdio_client

        parameters = StdioServerParameters(
            command=self.command,
            args=list(self.args),
            env=dict(self.env),
            cwd=self.cwd,
            encoding_error_handler="replace",
        )
        limit_lines()
        with tempfile.TemporaryFile("w+") as stderr:
            try:
                with anyio.CancelScope() as connection:
                    _end_connection.set(connection.cancel)
                    async with stdio_client(parameters, stderr) as streams, _start_session(streams) as session:
                        yield session
                if connection.cancelled_caught:
                    raise ToolFailureError(f"sent a reply of more than {MAX_REPLY_BYTES:,} bytes")
            except Exception as error:  # the SDK raises exception groups of any kind
                raise ToolFailureError(_describe(error) + _read_tail(stderr)) from error


@dataclass(frozen=True, slots=True)
class HttpServer:
    """An MCP server behind a URL (streamable HTTP)."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None

    @property
    def label(self) -> str:
        return f"the MCP server {'' if self.name is None else f'{self.name} at '}{redact(self.url)}"

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[ClientSession]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        status = ""
        session_ids: dict[httpx2.URL, str] = {}

        async def read_headers(response: httpx2.Response) -> None:
            nonlocal status
            limit_body(response)
            if response.request.method == "POST":
                status = f" (HTTP {response.status_code})" if response.status_code >= 400 else ""
            if not session_ids and (session_id := response.headers.get("mcp-session-id")):
                session_ids[response.request.url] = session_id

        client = httpx2.AsyncClient(
            headers={**self.headers, **UNCOMPRESSED},
            verify=create_ssl_context(),
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            limits=httpx2.Limits(max_keepalive_connections=0),  # an idle connection may be closed while a call is sent
            event_hooks={"response": [read_headers]},
        )
        async with client:
            try:
                transport = streamable_http_client(
                    self.url, http_client=client, terminate_on_close=False, max_sse_event_size=MAX_REPLY_BYTES
                )
                async with transport as streams, _start_session(streams) as session:
                    yield session
            except Exception as error:  # the SDK raises exception groups of any kind
                raise ToolFailureError(_describe(error) + status) from error
            finally:  # the SDK does not end the session of a connection that broke
                for url, session_id in session_ids.items():
                    with anyio.move_on_after(DELETE_S, shield=True), contextlib.suppress(httpx2.HTTPError):
                        await client.delete(url, headers={"mcp-session-id": session_id})


McpServer = StdioServer | HttpServer
_end_connection: ContextVar[Callable[[], None]] = ContextVar("end_connection")


def limit_body(response: httpx2.Response) -> None:
    """Refuse a compressed body, and let any other be read as UTF-8 up to `MAX_REPLY_BYTES`."""
    import httpx2

    refuse_compression(response.headers)
    response.encoding = "utf-8"  # a charset that the server names may take minutes to decode
    body = response.stream
    assert isinstance(body, httpx2.AsyncByteStream)

    class LimitedBody(httpx2.AsyncByteStream):
        def __init__(self, body: httpx2.AsyncByteStream) -> None:
            self._body = body

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for part in self._body:
                check_size(size := size + len(part))
                yield part

        async def aclose(self) -> None:
            await self._body.aclose()

    response.stream = LimitedBody(body)


def limit_lines() -> None:
    """End connections to processes that send a line of more than `MAX_REPLY_BYTES`; calling it again is a no-op.

    mcp 2.3 reads lines of any length, and copies the beginning of a line with each part of it that arrives. Remove
    this patch when `stdio_client` has a limit.
    """
    from anyio.streams.text import TextReceiveStream
    from mcp.client import stdio

    class LimitedText(TextReceiveStream):
        length = 0  # of the current line

        async def receive(self) -> str:
            text = await super().receive()
            self.length = len(text) + (self.length if "\n" not in text else -1 - text.rindex("\n"))
            if self.length > MAX_REPLY_BYTES:
                _end_connection.get()()
                raise anyio.EndOfStream
            return text

    if stdio.TextReceiveStream is TextReceiveStream:
        stdio.TextReceiveStream = LimitedText  # type: ignore[misc]


class McpSession:
    """A session of one episode, opened by its first call."""

    def __init__(self, server: McpServer) -> None:
        self._server, self._episode = server, uuid.uuid4().hex
        self.max_sessions = MAX_PROCESSES if isinstance(server, StdioServer) else MAX_CONNECTIONS
        self._owner: asyncio.Task[None] | None = None
        self._opening = anyio.CancelScope()
        self._is_open, self._closing = asyncio.Event(), asyncio.Event()
        self._session: ClientSession | None = None
        self._problem: Exception | None = None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Send a call once. If the connection breaks, the call may have arrived."""
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS, CallToolRequest, CallToolRequestParams, CallToolResult

        session = await self._open()
        fields = {"name": name, "arguments": dict(arguments), "_meta": {_EPISODE: self._episode}}
        request = CallToolRequest(params=CallToolRequestParams.model_validate(fields))
        try:
            # Not `call_tool`, which lists all tools again after the first call, to validate structured results.
            result = await session.send_request(request, CallToolResult)
        except Exception as error:  # an error of the protocol, the connection or the server
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                raise ToolError(error.message) from None
            await self._abandon(error)
            raise ToolFailureError(f"{name}: {self._describe_problem()}") from error
        return read_result(result)

    async def list_tools(self) -> list[Mapping[str, Any]]:
        session = await self._open()
        try:
            tools = await _list_tools(session)
        except Exception as error:  # an error of the protocol, the connection or the server
            await self._abandon(error)
            raise ToolFailureError(self._describe_problem()) from error
        return [make_schema(tool.name, tool.description or "", tool.input_schema) for tool in tools]

    async def close(self) -> None:
        """End the session. If this call is cancelled, the task of the session still ends the session."""
        self._closing.set()
        if not self._is_open.is_set():
            self._opening.cancel()
        if self._owner is None:
            return
        done, _ = await asyncio.wait([self._owner], timeout=CLOSE_S)
        if not done:
            _log.warning("%s did not end its session within %g s; abandoning the session", self._server.label, CLOSE_S)
            self._owner.cancel()

    def when_ended(self, callback: Callable[[], None]) -> None:
        if self._owner is None:
            callback()
        else:
            self._owner.add_done_callback(lambda owner: callback())

    async def _open(self) -> ClientSession:
        if self._owner is None and not self._closing.is_set():
            self._owner = asyncio.create_task(self._own())
            _owners.add(self._owner)
            self._owner.add_done_callback(_owners.discard)
        if self._owner is not None:
            await self._is_open.wait()
        if self._session is None:
            raise ToolFailureError(self._describe_problem())
        return self._session

    async def _own(self) -> None:
        """Open the session, wait until `close` is called, and close the session."""
        try:
            with self._opening:
                async with self._server.connect() as session:
                    self._session = session
                    self._is_open.set()
                    await self._closing.wait()
                    if self._problem is not None:
                        raise self._problem  # so that `connect` can add the status or the output of the server
        except Exception as error:  # noqa: BLE001 - raised by the calls of the session
            self._problem = error
        finally:
            self._session = None
            self._is_open.set()

    async def _abandon(self, error: Exception) -> None:
        """End a broken session, and record why it broke."""
        if self._problem is None:
            self._problem = error
        await self.close()

    def _describe_problem(self) -> str:
        problem = self._problem
        return f"{self._server.label}: {_describe(problem) if problem is not None else 'the session is closed'}"


def read_result(result: CallToolResult) -> ToolResult:
    """Return the text of a result. Raise `ToolError` if the tool reports an error."""
    text = "\n".join(_to_text(block) for block in result.content)
    if not result.content and result.structured_content is not None:
        text = to_result(result.structured_content).text
    text = replace_surrogates(text)
    if result.is_error:
        raise ToolError(text or "the tool reports an error")
    return ToolResult(text)


def _to_text(block: ContentBlock) -> str:
    """Return text unchanged, and a description of any other content."""
    if block.type == "text":
        return block.text
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return text if text is not None else f"[resource {block.resource.uri}, {block.resource.mime_type or 'binary'}]"
    if block.type == "resource_link":
        return f"[resource {block.uri}]"
    return f"[{block.type}, {block.mime_type}]"


@asynccontextmanager
async def _start_session(streams: tuple[Any, Any]) -> AsyncIterator[ClientSession]:
    """Open a session. Use the stateless protocol of 2026-07-28 only as the last resort: tools may keep state."""
    from mcp import ClientSession, MCPError
    from mcp.types import METHOD_NOT_FOUND, UNSUPPORTED_PROTOCOL_VERSION

    async with ClientSession(*streams) as session:
        try:
            await session.initialize()
        except MCPError as error:
            if error.code not in (METHOD_NOT_FOUND, UNSUPPORTED_PROTOCOL_VERSION):
                raise
            await session.discover()
            await _list_tools(session)  # lists which arguments a call repeats in its headers
        yield session


async def _list_tools(session: ClientSession) -> list[Tool]:
    from mcp.types import PaginatedRequestParams

    tools: list[Tool] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _describe(error: BaseException) -> str:
    """Return a description of an error; for a group of errors, of the root cause."""
    from mcp import MCPError

    errors = list(_iter_errors(error))
    first = next((each for each in errors if not isinstance(each, MCPError)), errors[0])
    return str(first) if isinstance(first, (MCPError, ToolFailureError)) else f"{type(first).__name__}: {first}"


def _iter_errors(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [each for inner in error.exceptions for each in _iter_errors(inner)]
    return [error]


def _read_tail(stderr: TextIO) -> str:
    """Return the end of the output of a process. Does not move the file position, which the process shares."""
    size = os.fstat(stderr.fileno()).st_size
    length = min(size, 4 * _STDERR_CHARACTERS)
    text = os.pread(stderr.fileno(), length, size - length).decode(errors="replace").strip()
    return f"; its last output: {redact(text[-_STDERR_CHARACTERS:])}" if text else ""
