"""Client of an OpenAI-compatible chat completions endpoint, with retries and a rate limit."""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import httpx

from verl.errors import RewardError
from verl.rewards.judge.cache import JudgeCache

_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 30.0
_RETRYABLE = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_CHECK_KEY = "check the key in the environment variable that reward_kwargs.key_env names, and its permissions"
_FIXES = {
    400: "check reward_kwargs.model and options",
    401: _CHECK_KEY,
    403: _CHECK_KEY,
    404: "check reward_kwargs.url, which usually ends in /v1, and model",
    413: "the prompt is too long for the judge: lower data.max_response_length",
    422: "check reward_kwargs.model and options",
}
_ssl_context = lru_cache(ssl.create_default_context)  # reading the certificates takes longer than a request


class _UnavailableError(Exception):
    """A request that may succeed later, after `retry_after_s` if the service asks for that."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class JudgeClient:
    """Sends requests to one endpoint. All processes that share `cache` share the rate limit."""

    url: str
    key: str | None
    cache: JudgeCache
    requests_per_minute: float | None
    retries: int
    timeout_s: float

    async def complete(self, payload: Mapping[str, Any]) -> str:
        """Return the text of the reply; retry with increasing waits while the service is unavailable."""
        interval_s = 60.0 / self.requests_per_minute if self.requests_per_minute else 0.0
        for attempt in range(self.retries + 1):
            if interval_s:
                await asyncio.sleep(await asyncio.to_thread(self.cache.reserve_turn, interval_s))
            try:
                return self._read_content(await self._post(payload))
            except _UnavailableError as error:
                problem, wait_s = str(error), min(_MAX_WAIT_S, _FIRST_WAIT_S * 2**attempt) * random.uniform(0.5, 1.0)
                if error.retry_after_s is not None:
                    wait_s = max(wait_s, error.retry_after_s)
                    if interval_s:
                        await asyncio.to_thread(self.cache.delay_turns, wait_s)
            if attempt < self.retries:
                await asyncio.sleep(wait_s)
        raise RewardError(
            f"The judge at {self.url} {problem} (after {self.retries + 1} requests). Check that it runs, lower "
            "reward_kwargs.requests_per_minute, or increase reward_kwargs.retries or timeout_s"
        )

    async def _post(self, payload: Mapping[str, Any]) -> httpx.Response:
        """Return the reply to one request, which arrives within `timeout_s` in total."""
        url = self.url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            # Redirects are not followed: they would send the key elsewhere. A proxy could read it in plain HTTP.
            use_proxy = self.key is None or httpx.URL(url).scheme != "http"
            async with httpx.AsyncClient(verify=_ssl_context(), trust_env=use_proxy, timeout=None) as client:
                request = client.post(url, content=json.dumps(payload), headers=headers)
                return await asyncio.wait_for(request, self.timeout_s)
        except TimeoutError:
            raise _UnavailableError(f"sent no reply within timeout_s={self.timeout_s:g}") from None
        except (httpx.UnsupportedProtocol, httpx.InvalidURL, ValueError, ImportError) as error:
            raise RewardError(
                f"The judge at {self.url} cannot be called: {error}; check reward_kwargs.url, for example "
                "https://host/v1, and the proxy in the environment"
            ) from None
        except (httpx.HTTPError, OSError) as error:
            raise _UnavailableError(f"cannot be reached: {_find_root_cause(error)!r}") from None

    def _read_content(self, reply: httpx.Response) -> str:
        # Redacted before any part of it reaches a message or the cache.
        body = reply.content.replace(self.key.encode(), b"***") if self.key else reply.content
        status, excerpt = reply.status_code, body[:300].decode(errors="replace")
        if status in _RETRYABLE:
            raise _UnavailableError(f"returned HTTP {status}: {excerpt}", _parse_retry_after(reply.headers))
        if not reply.is_success:
            fix = _FIXES.get(status, "check reward_kwargs.url")
            raise RewardError(f"The judge at {self.url} returned HTTP {status}: {excerpt}; {fix}")
        try:
            choice = json.loads(body)["choices"][0]
            content, is_truncated = choice["message"]["content"], choice.get("finish_reason") == "length"
        except ValueError:
            raise _UnavailableError(f"sent a reply that is not JSON: {excerpt!r}") from None
        except (KeyError, IndexError, TypeError, AttributeError):
            content, is_truncated = None, False
        if not isinstance(content, str):
            raise _UnavailableError(f"sent JSON without choices[0].message.content: {excerpt}")
        if is_truncated:  # its verdict would be whatever it said so far
            raise RewardError(
                f"The reply of the judge at {self.url} was cut off after {len(content)} characters; allow longer "
                "replies with reward_kwargs.options={max_tokens: 2048}"
            )
        return content.encode(errors="replace").decode()  # JSON allows lone surrogates, SQLite does not


def _find_root_cause(error: BaseException) -> BaseException:
    """Return the error below those of httpx and httpcore, which hold theirs as cause or as argument."""
    while inner := error.__cause__ or next((arg for arg in error.args if isinstance(arg, BaseException)), None):
        error = inner
    return error


def _parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds in the Retry-After header: seconds, or a date by the clock of the service."""
    value = headers.get("Retry-After", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        now = headers.get("Date") or email.utils.formatdate(time.time(), usegmt=True)
        seconds = email.utils.parsedate_to_datetime(value) - email.utils.parsedate_to_datetime(now)
        return max(0.0, seconds.total_seconds())
    except (TypeError, ValueError):
        return None
