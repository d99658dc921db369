"""The model as an OpenAI-compatible endpoint for each episode, so that agents written with any SDK can be trained.

Each episode has a URL and a key of its own until it ends. Requests go to the `ChatModel` of the episode, which records
the tokens. The routes are `/e/{episode}/v1/chat/completions`, streamed and not, `/e/{episode}/v1/models`, and
`/e/{episode}/reward` for agents in other processes.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from verl.agents.chat_model import ChatModel
from verl.agents.gateway.chat_completions import MODEL, RequestError, read_request, write_events
from verl.agents.gateway.session import Session, make_ended_error
from verl.cluster.actors import get_node_address
from verl.errors import ConfigError

PORTS = 64  # ports to try, from the given one on: each worker of a machine needs its own
_RETRY_HEADER = "x-stainless-retry-count"  # sent by the SDKs of OpenAI; 0 at the first attempt


class Gateway:
    """An HTTP server on the event loop of the episodes that it serves."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host, self._port = host, port
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
            timeout_keep_alive=600,  # tools may take a while between two requests
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

    def _find(self, episode: str, request: Request) -> Session:
        """Return the open episode that a request may use."""
        if not episode.isdecimal() or int(episode) >= self._count:
            raise RequestError(404, "episode_not_found", "there is no such episode")
        if (session := self._sessions.get(int(episode))) is None:
            raise make_ended_error()
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), session.key.encode()):
            raise RequestError(401, "invalid_api_key", "the key does not belong to the episode")
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
            session, body = self._find(episode, request), await read_body(request)
            reward = body.get("reward") if isinstance(body, dict) else None
            if not isinstance(reward, (int, float)) or not math.isfinite(reward):
                raise RequestError(400, "invalid_request", 'the body has to be {"reward": a finite number}')
            session.set_reward(float(reward))
            return {"reward": float(reward)}

        @app.exception_handler(RequestError)
        async def refuse(request: Request, error: RequestError) -> Response:
            return JSONResponse(error.to_body(), error.status)

        @app.exception_handler(HTTPException)
        async def refuse_path(request: Request, error: HTTPException) -> Response:
            message = f"{request.method} {request.url.path} is not served; chat/completions and models are"
            return JSONResponse(RequestError(error.status_code, "not_found", message).to_body(), error.status_code)

        return app


async def read_body(request: Request) -> Any:
    try:
        return json.loads(await request.body())
    except ValueError as error:
        raise RequestError(400, "invalid_request", f"the body is not JSON: {error}") from None


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
