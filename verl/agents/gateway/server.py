"""The model as an OpenAI-compatible endpoint for each episode, so that agents written with any SDK can be trained.

Each episode has a URL and two keys of its own until it ends. With the first, requests go to the `ChatModel` of the
episode, which records the tokens: `/e/{episode}/v1/chat/completions`, streamed and not, and `/e/{episode}/v1/models`.
With the second, agents in other processes post the score to `/e/{episode}/reward`.

Whoever reaches the port can connect, so everything before the check of a key is bounded: the number of connections, the
size of headers, and the time until they are complete. Bodies are read afterwards, up to a size and in time.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from verl.agents.chat_model import ChatModel
from verl.agents.gateway.chat_completions import MODEL, RequestError, read_request, write_events
from verl.agents.gateway.session import Session, make_ended_error
from verl.agents.tools.json_servers import is_finite_number
from verl.cluster.actors import get_node_address
from verl.config.schema.rollout import GatewayConfig
from verl.data.lengths import count_characters
from verl.errors import ConfigError

PORTS = 64  # ports to try, from the given one on: each worker of a machine needs its own
MAX_CONNECTIONS = 4096  # or half of the files that the process may open
MAX_HEADER_BYTES = 64 << 10
MAX_BODY_BYTES = 8 << 20
REQUEST_S = 30.0  # for headers and body each
IDLE_S = 600.0  # between two requests of a connection: tools may take a while
_RETRY_HEADER = "x-stainless-retry-count"  # sent by the SDKs of OpenAI; 0 at the first attempt


class Gateway:
    """An HTTP server on the event loop of the episodes that it serves.

    With `accepts_rewards` an agent may post the score of its episode. A run with a reward of its own refuses it.
    """

    def __init__(self, settings: GatewayConfig, *, accepts_rewards: bool = True) -> None:
        self._host, self._port, self._max_reward = settings.host, settings.port, settings.max_reward
        self._accepts_rewards = accepts_rewards
        self._sessions: dict[int, Session] = {}
        self._count = 0  # episodes so far
        self._url = ""

    async def start(self) -> None:
        listener = bind_socket(self._host, self._port)
        host = get_node_address() if self._host in ("0.0.0.0", "::", "") else self._host
        bypass_proxies(host)
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            self._build_app(),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            http=_Connection,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=int(IDLE_S),
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving = asyncio.ensure_future(self._server.serve([listener]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            self._serving.result()

    async def close(self) -> None:
        self._server.should_exit = True
        await self._serving

    @contextmanager
    def open(self, model: ChatModel, max_invalid_calls: int = 1 << 30) -> Iterator[Session]:
        """Serve an episode until the end of the context."""
        number, self._count = self._count, self._count + 1
        session = Session(model, str(number), f"{self._url}/e/{number}/v1", max_invalid_calls)
        self._sessions[number] = session
        try:
            yield session
        finally:
            del self._sessions[number]
            session.close()

    def _find(self, episode: str, request: Request, *, posts_reward: bool = False) -> Session:
        """Return the open episode that a request may use."""
        if not episode.isdecimal() or len(episode) > 18 or int(episode) >= self._count:
            raise RequestError(404, "episode_not_found", "there is no such episode")
        if (session := self._sessions.get(int(episode))) is None:
            raise make_ended_error()
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        expected = session.reward_key if posts_reward else session.key
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), expected.encode()):
            name = "the reward_key of the agent" if posts_reward else "the key"
            raise RequestError(401, "invalid_api_key", f"this is not {name} of the episode")
        return session

    def _build_app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)

        @app.post("/e/{episode}/v1/chat/completions")
        async def complete_chat(episode: str, request: Request) -> Response:
            session = self._find(episode, request)
            body = await read_body(request)
            hang_up = asyncio.ensure_future(request.receive())  # after the body, the next message is the disconnect
            try:
                retries = request.headers.get(_RETRY_HEADER, "0")
                completion = await session.respond(body, hang_up, is_retry=retries != "0")
            finally:
                hang_up.cancel()
            if completion is None or not body.get("stream"):
                return JSONResponse(completion)
            events = write_events(completion, includes_usage=read_request(body).includes_usage)
            return Response(events, media_type="text/event-stream")

        @app.get("/e/{episode}/v1/models")
        async def list_models(episode: str, request: Request) -> dict[str, Any]:
            self._find(episode, request)
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "verl"}
            return {"object": "list", "data": [model]}

        @app.post("/e/{episode}/reward")
        @app.post("/e/{episode}/v1/reward")
        async def set_reward(episode: str, request: Request) -> dict[str, Any]:
            session = self._find(episode, request, posts_reward=True)
            if not self._accepts_rewards:
                raise RequestError(403, "reward_refused", "the run has a reward of its own, which scores the episode")
            body = await read_body(request)
            reward: Any = body.get("reward") if isinstance(body, dict) else None
            if not is_finite_number(reward) or not -self._max_reward <= reward <= self._max_reward:
                limit = f"a number from -{self._max_reward:g} to {self._max_reward:g}"
                raise RequestError(400, "invalid_request", f'the body has to be {{"reward": {limit}}}')
            session.set_reward(float(reward))
            return {"reward": float(reward)}

        @app.exception_handler(RequestError)
        async def refuse(request: Request, error: RequestError) -> Response:
            headers = {"connection": "close"} if error.status in (401, 404, 408, 413) else None
            return JSONResponse(error.to_body(), error.status, headers)

        @app.exception_handler(HTTPException)
        async def refuse_path(request: Request, error: HTTPException) -> Response:
            message = f"{request.method} {request.url.path} is not served; chat/completions and models are"
            return JSONResponse(RequestError(error.status_code, "not_found", message).to_body(), error.status_code)

        return app


async def read_body(request: Request) -> Any:
    content = bytearray()
    try:
        async with asyncio.timeout(REQUEST_S):
            async for part in request.stream():
                content += part
                if len(content) > MAX_BODY_BYTES:
                    raise RequestError(413, "request_too_large", f"the body has more than {MAX_BODY_BYTES:,} bytes")
        body = json.loads(content)
        count_characters(body)  # recurses, as rendering does
    except TimeoutError:
        raise RequestError(408, "timeout", f"the body was not complete within {REQUEST_S:g} s") from None
    except RecursionError:
        raise RequestError(400, "invalid_request", "the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(400, "invalid_request", f"the body is not JSON: {error}") from None
    return body


class _Connection(H11Protocol):
    """A connection, which is dropped unless the headers of its next request are complete in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2):
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _watch(self) -> None:
        is_serving = self.cycle is not None and not self.cycle.response_complete
        if is_serving:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the first free port from `port` on; 0 for any port."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for each in range(port, port + PORTS) if port else [0]:
        try:
            listener.bind((host, each))
            listener.listen()  # until then another process may bind the same port
            return listener
        except OSError as error:
            problem = error
    listener.close()
    setting = f"actor_rollout_ref.rollout.gateway: cannot listen on {host}, port {port}"
    raise ConfigError([f"{setting}{f' to {port + PORTS - 1}' if port else ''}: {problem}"])


def bypass_proxies(host: str) -> None:
    """Let clients in this process and its child processes connect to `host` without a proxy."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [each for each in os.environ.get(name, "").split(",") if each]
        if host not in hosts:
            os.environ[name] = ",".join([*hosts, host])
