"""Tool servers that speak plain JSON. `GET /tools` lists their tools, `POST /call` calls one:

    {"name": "lookup", "arguments": {"key": "a"}, "episode": "6f1c..."}  ->  {"result": "7", "reward": 0.5}

The reward is optional. `{"error": "..."}` is a mistake, which the model reads. A server with state keeps the state by
`episode`, a text that is different for every episode.
"""

from __future__ import annotations

import json
import ssl
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import httpx

from verl.agents.errors import ToolError, ToolFailureError
from verl.agents.messages import replace_surrogates
from verl.agents.tools.results import ToolResult, to_result
from verl.redaction import redact

MAX_REPLY_BYTES = 8 << 20  # far more than a model reads; parsing them takes a fraction of a second
UNCOMPRESSED = {"Accept-Encoding": "identity"}
CONNECT_S = 5.0  # the call has a timeout of its own
_EXCERPT = 300
_NOT_MODEL_ERRORS = {401, 403, 404, 405, 407, 408, 421, 425, 426, 429, 431}
"""Statuses that say nothing about the arguments, unless the reply has an `error`."""
create_ssl_context = lru_cache(ssl.create_default_context)  # reading the certificates takes longer than a request


class JsonSession:
    """The calls of one episode to the server below a URL."""

    max_sessions = 1024

    def __init__(self, url: str) -> None:
        self._url, self._episode = httpx.URL(url), uuid.uuid4().hex

    async def list_tools(self) -> list[Mapping[str, Any]]:
        """Return the schemas of the tools. Raise `httpx.TransportError` if the server cannot be reached."""
        response = await _send("GET", self.join("tools"))
        if not response.is_success:
            raise ToolFailureError(f"GET /tools returned HTTP {response.status_code}")
        tools = _read_json(response)
        if isinstance(tools, Mapping):
            tools = tools.get("tools")
        if not isinstance(tools, list):
            raise ToolFailureError(f"GET /tools did not return a JSON list: {_excerpt(response)}")
        return [to_schema(tool) for tool in tools]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Send a call once. If the connection breaks, the call may have arrived."""
        body = {"name": name, "arguments": dict(arguments), "episode": self._episode}
        server = f"{name}: the tool server {redact(str(self._url))}"
        try:
            return read_reply(await _send("POST", self.join("call"), json=body))
        except httpx.HTTPError as error:
            raise ToolFailureError(f"{server}: {type(error).__name__}: {error}") from error
        except ToolFailureError as error:
            raise ToolFailureError(f"{server} {error}") from error

    async def close(self) -> None:
        """Do nothing: the server has no session."""

    def when_ended(self, callback: Callable[[], None]) -> None:
        callback()

    def join(self, name: str) -> httpx.URL:
        return self._url.copy_with(path=f"{self._url.path.rstrip('/')}/{name}")


async def _send(method: str, url: httpx.URL, **options: Any) -> httpx.Response:
    """Return the response to a request, whose body is read up to `MAX_REPLY_BYTES`."""
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    # A client per request: an idle connection may be closed while the next call is sent.
    async with (
        httpx.AsyncClient(verify=create_ssl_context(), timeout=timeout, headers=UNCOMPRESSED) as client,
        client.stream(method, url, **options) as response,
    ):
        refuse_compression(response.headers)
        content = bytearray()
        async for part in response.aiter_raw():
            content += part
            check_size(len(content))
    return httpx.Response(response.status_code, headers=response.headers, content=bytes(content))


def refuse_compression(headers: Mapping[str, str]) -> None:
    """Raise `ToolFailureError` for a compressed reply: a megabyte of it may become gigabytes."""
    if (encoding := headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise ToolFailureError(f"compresses its replies ({encoding[:40]}), although it was asked not to")


def check_size(size: int) -> None:
    if size > MAX_REPLY_BYTES:
        raise ToolFailureError(f"sent a reply of more than {MAX_REPLY_BYTES:,} bytes")


def read_reply(response: httpx.Response) -> ToolResult:
    """Return the result of a call; raise `ToolError` for a mistake of the model."""
    status, body = response.status_code, _read_json(response)
    error = body.get("error") if isinstance(body, Mapping) else None
    if 400 <= status < 500 and (error is not None or status not in _NOT_MODEL_ERRORS):
        raise ToolError(_to_text(error) if error is not None else _excerpt(response) or f"HTTP {status}")
    if not response.is_success:
        raise ToolFailureError(f"returned HTTP {status}: {_excerpt(response)}")
    if error is not None:
        raise ToolError(_to_text(error))
    if not isinstance(body, Mapping) or "result" not in body:
        raise ToolFailureError(f'returned neither "result" nor "error": {_excerpt(response)}')
    return ToolResult(_to_text(body["result"]), _read_reward(body.get("reward")))


def to_schema(tool: Any) -> Mapping[str, Any]:
    """Return the schema of a tool as in a chat completion request, from that or from `{name, parameters}`."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ToolFailureError(f"GET /tools returned a tool without a name: {str(tool)[:_EXCERPT]}")
    keys: Sequence[str] = ("parameters", "input_schema", "inputSchema")
    parameters = next((function[key] for key in keys if function.get(key) is not None), None)
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise ToolFailureError(f"GET /tools did not return a JSON schema for the parameters of {function['name']}")
    description = str(function.get("description") or "")
    return make_schema(function["name"], description, parameters)


def make_schema(name: str, description: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _read_json(response: httpx.Response) -> Any:
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError):
        return None


def _read_reward(reward: Any) -> float:
    if reward is None:
        return 0.0
    if not is_finite_number(reward):
        raise ToolFailureError(f"returned the reward {str(reward)[:_EXCERPT]}, which is not a finite number")
    return float(reward)


def is_finite_number(value: Any) -> bool:
    """Return whether a value of JSON is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def _to_text(value: Any) -> str:
    return replace_surrogates(to_result(value).text)


def _excerpt(response: httpx.Response) -> str:
    """Return the beginning of a reply as text; a charset that the server names may take minutes, or raise any error."""
    return response.content[: 4 * _EXCERPT].decode(errors="replace")[:_EXCERPT]
