"""The requests of one episode to its model, as they come from clients that time out, hang up and retry.

A reply becomes a part of the episode when a client receives it. A client that hangs up, after a timeout for example,
does not stop the request: the next equal request gets the reply. So does a retry of an SDK, even if the reply seemed to
be received. A reply that no client has received is dropped at the end: nothing in the episode depends on it. Equal
requests of clients that are still connected are different requests, each with a reply of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from dataclasses import dataclass
from typing import Any

from verl.agents.chat_model import ChatModel, Draft, InvalidRequestError
from verl.agents.errors import EpisodeLimitError
from verl.agents.formats.tool_calls import InvalidCall
from verl.agents.gateway.chat_completions import ChatRequest, RequestError, read_request, write_completion
from verl.errors import DataError

MAX_RUNNING = 64  # requests of an episode at once


@dataclass(eq=False)
class Exchange:
    """A request and its reply."""

    drafting: asyncio.Task[Draft]
    waiting: int = 0  # number of clients
    completion: dict[str, Any] | None = None  # set when a client receives the reply

    @property
    def is_lost(self) -> bool:
        return not self.waiting and self.completion is None


class Session:
    """The requests of one episode.

    `limit` is set once the episode has used up its tokens or turns: no further request is taken, and the episode is
    truncated, whatever its agent does next. `failure` is an error of the engine after which no retry succeeded.
    """

    def __init__(self, model: ChatModel, name: str, base_url: str, max_invalid_calls: int) -> None:
        self.base_url, self.key, self.reward_key = base_url, secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.limit: EpisodeLimitError | None = None
        self._model, self._name, self._max_invalid_calls = model, name, max_invalid_calls
        self._exchanges: dict[str, list[Exchange]] = {}  # hash of a request -> its exchanges
        self._running = 0
        self._failures: dict[str, Exception] = {}
        model.transcript.metrics |= {"tools/calls": 0.0, "tools/invalid_calls": 0.0}

    @property
    def failure(self) -> Exception | None:
        return next(iter(self._failures.values()), None)

    async def respond(self, body: Any, hang_up: asyncio.Future[Any], *, is_retry: bool) -> dict[str, Any] | None:
        """Return the completion for a request; None if the client hangs up first."""
        request, key = read_request(body), hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        exchange = self._find(key, is_retry=is_retry) or self._start(key, request)
        exchange.waiting += 1
        try:
            await asyncio.wait([exchange.drafting, hang_up], return_when=asyncio.FIRST_COMPLETED)
        finally:
            exchange.waiting -= 1
        if hang_up.done():
            return None
        if exchange.completion is None:
            exchange.completion = self._record(get_result(exchange.drafting), request)
        return exchange.completion

    def set_reward(self, reward: float) -> None:
        """Set the score of the episode, which a score that the agent returns replaces."""
        self._model.transcript.score = reward

    def close(self) -> None:
        for exchanges in self._exchanges.values():
            for exchange in exchanges:
                exchange.drafting.cancel()

    def _find(self, key: str, *, is_retry: bool) -> Exchange | None:
        """Return an earlier exchange of an equal request whose reply must be sent again."""
        earlier = self._exchanges.get(key, [])
        lost = next((each for each in earlier if each.is_lost), None)
        return earlier[-1] if lost is None and is_retry and earlier else lost

    def _start(self, key: str, request: ChatRequest) -> Exchange:
        metrics = self._model.transcript.metrics
        if self.limit is None and metrics["tools/invalid_calls"] > self._max_invalid_calls:
            self._end(EpisodeLimitError(f"{self._max_invalid_calls} invalid calls"))
        if self.limit is not None:
            raise to_request_error(self.limit)
        if self._running >= MAX_RUNNING:
            raise RequestError(429, "too_many_requests", f"{MAX_RUNNING} requests of the episode run already")
        self._running += 1
        exchange = Exchange(asyncio.ensure_future(self._draft(key, request)))
        exchange.drafting.add_done_callback(self._count_end)
        exchange.drafting.add_done_callback(lambda task: task.cancelled() or task.exception())  # its client may be gone
        self._exchanges.setdefault(key, []).append(exchange)
        return exchange

    def _count_end(self, drafting: asyncio.Task[Draft]) -> None:
        self._running -= 1

    async def _draft(self, key: str, request: ChatRequest) -> Draft:
        try:
            draft = await self._model.request(
                request.messages, request.tools, max_tokens=request.max_tokens, parse_calls=request.parses_calls
            )
        except EpisodeLimitError as error:
            self._end(error)
            raise
        except Exception as error:
            self._exchanges[key] = [
                each for each in self._exchanges[key] if each.drafting is not asyncio.current_task()
            ]
            if not isinstance(error, (InvalidRequestError, DataError)):
                self._failures[key] = error
            raise
        self._failures.pop(key, None)
        return draft

    def _record(self, draft: Draft, request: ChatRequest) -> dict[str, Any]:
        try:
            reply = self._model.record(draft)
        except EpisodeLimitError:
            raise make_ended_error() from None
        transcript = self._model.transcript
        transcript.messages = [*request.messages, reply.message]
        invalid = sum(isinstance(call, InvalidCall) for call in reply.calls)
        transcript.metrics["tools/calls"] += len(reply.calls)
        transcript.metrics["tools/invalid_calls"] += invalid
        return write_completion(reply, request.model, f"chatcmpl-{self._name}-{len(transcript.turns)}")

    def _end(self, limit: EpisodeLimitError) -> None:
        self.limit = limit
        self._model.transcript.is_truncated = True


def get_result(drafting: asyncio.Task[Draft]) -> Draft:
    """Return a draft, or raise the error response for the client."""
    try:
        return drafting.result()
    except asyncio.CancelledError:
        raise make_ended_error() from None
    except Exception as error:
        raise to_request_error(error) from error


def make_ended_error() -> RequestError:
    return RequestError(410, "episode_ended", "the episode has ended")


def to_request_error(error: Exception) -> RequestError:
    if isinstance(error, EpisodeLimitError):
        return RequestError(400, "context_length_exceeded", f"a limit of the episode is reached: {error}")
    if isinstance(error, (InvalidRequestError, DataError)):
        return RequestError(400, "invalid_request", str(error))
    return RequestError(500, "engine_error", f"the request to the model failed: {type(error).__name__}: {error}")
