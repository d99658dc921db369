"""Tools of servers: a server with a URL, or the MCP servers of a file. Each episode has a session of its own.

Tools are listed when a run starts, so an unreachable server is reported within seconds. A call is sent once: a broken
connection fails the episode, which is then repeated from its start.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx

from verl.agents.clock import stop_clocks
from verl.agents.errors import ToolFailureError
from verl.agents.tools.function_tools import Tool
from verl.agents.tools.json_servers import JsonSession
from verl.agents.tools.mcp_servers import HttpServer, McpServer, McpSession, StdioServer
from verl.agents.tools.results import ToolResult
from verl.agents.user_code import run_with_timeout
from verl.errors import ConfigError
from verl.installation import format_install_hint
from verl.redaction import redact, remember

T = TypeVar("T")
_log = logging.getLogger(__name__)
START_S = 20.0  # timeout for listing the tools of a server
_HTTP_TYPES = (None, "http", "streamable-http", "streamable_http", "streamableHttp")
_NO_EFFECT = ("rate_limit", "timeout", "num_workers")  # options of other implementations of these files


class ToolSession(Protocol):
    """The calls of one episode. `close` ends the session, if there is one; a worker opens `max_sessions` at once."""

    max_sessions: int

    async def list_tools(self) -> Sequence[Mapping[str, Any]]: ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult: ...

    async def close(self) -> None: ...

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call `callback` when nothing of the session is left, which may be after `close` gave up."""


class ServerTool:
    """A tool of a server in one episode."""

    def __init__(self, schema: Mapping[str, Any], session: ToolSession) -> None:
        self.schema, self._session = schema, session

    async def call(self, arguments: Mapping[str, Any], timeout_s: float) -> ToolResult:
        name = self.schema["function"]["name"]
        return await run_with_timeout(self._session.call(name, arguments), timeout_s, name)


class ServerSource:
    """The tools of a server. `start_session` returns the session of an episode.

    An episode waits until one of `max_sessions` is free, which does not count as its time. Each opens its sources in
    the same order: no two wait for each other.
    """

    def __init__(
        self, start_session: Callable[[], ToolSession], schemas: Sequence[Mapping[str, Any]], max_sessions: int
    ) -> None:
        self._start_session, self._schemas, self._max_sessions = start_session, schemas, max_sessions
        self._free = asyncio.Semaphore(max_sessions)

    @asynccontextmanager
    async def open(self, row: Mapping[str, Any]) -> AsyncIterator[Sequence[Tool]]:
        with stop_clocks():
            await self._free.acquire()
        session = self._start_session()
        try:
            yield [ServerTool(schema, session) for schema in self._schemas]
        finally:
            try:
                await session.close()
            finally:
                session.when_ended(self._free.release)

    def list_schemas(self) -> Sequence[Mapping[str, Any]]:
        return self._schemas

    def select(self, names: Sequence[str]) -> ServerSource:
        """Return the same source with only these tools."""
        selected = [each for each in self._schemas if each["function"]["name"] in names]
        return ServerSource(self._start_session, selected, self._max_sessions)


def load_tool_server(url: str, key: str) -> ServerSource:
    """Find out which protocol a tool server speaks, and return its tools."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError([f"{key}: {redact(url)} is not a URL: {error}; set it to http://host:port"]) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError([f"{key}: {redact(url)} is not the URL of a server; set it to http://host:port"])
    fix = f"start the server, check the URL, or set {key}=null"
    try:
        source = _run_in_own_loop(_list_in_time(_find_protocol(url)))
    except ToolFailureError as error:
        raise ConfigError([f"{key}: the tool server {redact(url)} {redact(str(error))}; {fix}"]) from error
    if not source.list_schemas():
        raise ConfigError([f"{key}: the tool server {redact(url)} has no tools; add one, or set {key}=null"])
    return source


async def _find_protocol(url: str) -> ServerSource:
    """Try MCP, plain JSON, and MCP at its usual path below the root."""
    root, problems = httpx.URL(url), []
    has_mcp = importlib.util.find_spec("mcp") is not None
    if not has_mcp:
        problems.append(_explain_missing_mcp())
    else:
        try:
            async with asyncio.timeout(START_S / 2):
                return await _load_source(partial(McpSession, HttpServer(url)))
        except (ToolFailureError, TimeoutError) as error:
            problems.append(str(error) or "no reply as an MCP server")
    try:
        return await _load_source(partial(JsonSession, url))
    except httpx.HTTPError as error:
        raise ToolFailureError(f"cannot be reached: {type(error).__name__}: {error}") from error
    except ToolFailureError as error:
        problems.append(str(error))
    if has_mcp and root.path in ("", "/"):
        try:
            return await _load_source(partial(McpSession, HttpServer(str(root.copy_with(path="/mcp")))))
        except ToolFailureError as error:
            problems.append(str(error))
    raise ToolFailureError(f"speaks neither MCP nor plain JSON ({'; '.join(problems)})")


def _explain_missing_mcp() -> str:
    return f"MCP servers need the package mcp: {format_install_hint('agents')}"


async def _load_source(start_session: Callable[[], ToolSession]) -> ServerSource:
    session = start_session()
    try:
        return ServerSource(start_session, await session.list_tools(), session.max_sessions)
    finally:
        await session.close()


def load_mcp_servers(spec: Mapping[str, Any], where: str, folder: Path) -> list[ServerSource]:
    """Return the tools of the MCP servers that an entry of a tool file names.

    The entry has `mcp: {mcp_servers_config_path, tool_selected_list}`, where the list may be missing: all tools. The
    path is relative to the current folder, or else to `folder`, that of the tool file.
    """
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError([f"{where}: {_explain_missing_mcp()}"])
    _check_class(spec, where)
    options = spec.get("mcp") or {}
    servers = read_servers_file(options.get("mcp_servers_config_path"), where, folder)
    found = _run_in_own_loop(_load_all(servers))
    if problems := [f"{where}: {redact(str(each))}" for each in found if isinstance(each, BaseException)]:
        raise ConfigError(problems)
    sources = [each for each in found if isinstance(each, ServerSource)]
    if (selected := options.get("tool_selected_list")) is not None:
        sources = _select(sources, selected, where)
    return sources


def read_servers_file(path: Any, where: str, folder: Path) -> list[McpServer]:
    """Return the servers of a JSON file `{"mcpServers": {name: {command, args, env} or {url, headers}}}`."""
    if not isinstance(path, str):
        raise ConfigError([f"{where}: a tool of type mcp needs mcp.mcp_servers_config_path, a JSON file of servers"])
    file = Path(path).expanduser()
    if not file.exists():
        file = folder / file
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError([f"{where}: mcp_servers_config_path={path} cannot be read: {error}"]) from error
    except ValueError as error:
        raise ConfigError([f"{where}: mcp_servers_config_path={path} is not JSON: {error}"]) from error
    entries = content.get("mcpServers") if isinstance(content, Mapping) else None
    if not isinstance(entries, Mapping) or not entries:
        example = '{"mcpServers": {"name": {"url": "http://host:port/mcp"}}}'
        raise ConfigError([f"{where}: mcp_servers_config_path={path} has no servers; write it as {example}"])
    remember(content)
    return [read_server(str(name), entry, f"{where}: {path}") for name, entry in entries.items()]


def read_server(name: str, entry: Any, where: str) -> McpServer:
    fields = entry if isinstance(entry, Mapping) else {}
    kind = fields.get("type", fields.get("transport"))
    try:
        if "command" in fields and kind in (None, "stdio"):
            args, env = [str(each) for each in fields.get("args") or ()], _read_texts(fields, "env")
            return StdioServer(name, str(fields["command"]), args, env, fields.get("cwd"))
        if "url" in fields and kind in _HTTP_TYPES:
            headers = _read_texts(fields, "headers")
            if token := fields.get("auth_token"):
                headers["Authorization"] = f"Bearer {token}"
            return HttpServer(str(fields["url"]), headers, name)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError([f"{where}: the entry of the server {name} cannot be read: {error}"]) from error
    raise ConfigError(
        [f"{where}: the server {name} needs a command (stdio) or a url (streamable HTTP); other transports are refused"]
    )


def _read_texts(fields: Mapping[str, Any], name: str) -> dict[str, str]:
    return {str(key): str(value) for key, value in (fields.get(name) or {}).items()}


def _check_class(spec: Mapping[str, Any], where: str) -> None:
    """Refuse tool classes of the user, and report options that have no effect."""
    name = str(spec.get("class_name") or "")
    if name and not name.startswith("verl."):
        raise ConfigError(
            [f"{where}: {name} cannot be the class of an MCP tool; remove class_name, or set type: native"]
        )
    if ignored := [option for option in _NO_EFFECT if option in (spec.get("config") or {})]:
        _log.warning("%s: %s of an MCP tool has no effect", where, ", ".join(ignored))


async def _load_all(servers: Sequence[McpServer]) -> list[ServerSource | BaseException]:
    loading = (_list_in_time(_load_source(partial(McpSession, server)), f"{server.label} ") for server in servers)
    return await asyncio.gather(*loading, return_exceptions=True)


def _select(sources: Sequence[ServerSource], names: Sequence[str], where: str) -> list[ServerSource]:
    known = [schema["function"]["name"] for source in sources for schema in source.list_schemas()]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            [f"{where}: no server has the tool {unknown[0]!r} of tool_selected_list; there are: {', '.join(known)}"]
        )
    return [selected for source in sources if (selected := source.select(names)).list_schemas()]


async def _list_in_time(work: Coroutine[Any, Any, T], name: str = "") -> T:
    try:
        async with asyncio.timeout(START_S):
            return await work
    except TimeoutError:
        raise ToolFailureError(f"{name}did not list its tools within {START_S:g} s") from None


def _run_in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop of its own: the caller's thread may already run an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
