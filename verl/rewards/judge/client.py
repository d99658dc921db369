"""One request to a chat-completions endpoint, and what its outcome means: a reply, try again, or do not."""

from __future__ import annotations

import email.utils
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

__all__ = ["RefusedError", "UnavailableError", "post"]

_BUSY = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_MOST_BYTES = 8 << 20
_MENDS = {
    400: "check reward_kwargs.model and options",
    401: "check the key in the environment variable that reward_kwargs.key_env names",
    403: "check the key in the environment variable that reward_kwargs.key_env names, and what it may use",
    404: "check reward_kwargs.url, which ends in /v1 mostly, and model",
    413: "the prompt is too long for it: lower data.max_response_length",
    422: "check reward_kwargs.model and options",
}


class UnavailableError(Exception):
    """Not now: worth another try, after `retry_after_s` if the service says so."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RefusedError(Exception):
    """The request itself is wrong: the same again would be refused again."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send the key to wherever it points."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def post(url: str, asked: Mapping[str, Any], key: str | None, timeout_s: float) -> Any:
    """The JSON that the endpoint sends, within `timeout_s` in all. The key is in no message."""
    base = url.rstrip("/")
    base = base if base.endswith("/chat/completions") else f"{base}/chat/completions"
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    deadline = time.monotonic() + timeout_s
    try:
        request = urllib.request.Request(base, json.dumps(asked).encode(), headers)
        with _OPENER.open(request, timeout=timeout_s) as reply:
            body = _body(reply, deadline)
    except urllib.error.HTTPError as error:
        said = f"answered HTTP {error.code}: {_excerpt(error, key)}"
        if error.code in _BUSY:
            raise UnavailableError(said, _retry_after(error.headers.get("Retry-After"))) from None
        raise RefusedError(f"{said}; {_MENDS.get(error.code, 'check reward_kwargs.url')}") from None
    except TimeoutError:
        raise UnavailableError(f"gave no reply within timeout_s={timeout_s:g}") from None
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        late = isinstance(why, TimeoutError)
        said = f"gave no reply within timeout_s={timeout_s:g}" if late else f"cannot be reached: {why!r}"
        raise UnavailableError(said) from None
    except ValueError as error:
        raise RefusedError(f"cannot be asked: {error}; check reward_kwargs.url, such as https://host/v1") from None
    try:
        return json.loads(body)
    except ValueError:
        raise UnavailableError(f"sent no JSON: {body[:200].decode(errors='replace')!r}") from None


def _body(reply: Any, deadline: float) -> bytes:
    """All of it, unless it drips in for too long or has no end."""
    parts = bytearray()
    while part := reply.read1(1 << 16):
        parts += part
        if time.monotonic() > deadline:
            raise TimeoutError
        if len(parts) > _MOST_BYTES:
            raise OSError(f"its reply is longer than {_MOST_BYTES >> 20} MB")
    if reply.length:  # fewer bytes than were promised
        raise http.client.IncompleteRead(bytes(parts), reply.length)
    return bytes(parts)


def _excerpt(error: urllib.error.HTTPError, key: str | None) -> str:
    try:
        text = error.read(2000).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return "(no text)"
    return (text.replace(key, "***") if key else text)[:300]


def _retry_after(value: str | None) -> float | None:
    """Seconds, of a header that has seconds or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
